/* The parts of libcuda and libnvidia-ml that a node agent uses before an engine comes, for GPUs that do not exist.
   How many there are is the first character of COUNT_FILE. The other functions of libcuda are made beside this file
   (libraries.py), and do nothing. No header is needed. */

extern int open(const char *path, int flags, ...);
extern long read(int descriptor, void *buffer, unsigned long size);
extern int close(int descriptor);

static int devices(void)
{
    char digit = '0';
    int descriptor = open(COUNT_FILE, 0);
    if (descriptor < 0)
        return 0;
    if (read(descriptor, &digit, 1) != 1)
        digit = '0';
    close(descriptor);
    return digit - '0';
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = devices(); return 0; }

int cuDeviceGetCount(int *count) { *count = devices(); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { name[0] = 'G'; name[1] = '0' + device; name[2] = 0; return 0; }
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 1ul << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device)
{
    int index;
    for (index = 0; index < 16; index++)
        uuid[index] = device;
    return 0;
}
