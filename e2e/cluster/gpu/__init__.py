"""Stand-ins for NVIDIA's runtime, devices and libraries, so that the ways to the GPUs can be walked without any."""
