#!/usr/bin/env bash
# Makes sure that the Debian packages are there which pip cannot bring: installs them as root, otherwise names them and fails.
#
#   tools/system_packages.sh [engine|cluster]      engine: also what a real vLLM on the CPU needs
#                                                  cluster: also what a Kubernetes on this machine, and its images, need
#
# PYTHON= is the interpreter that the virtual environments are made from (default python3).
set -euo pipefail
exec >&2
python=${PYTHON:-python3}

if ! command -v "$python" >/dev/null; then
    echo "set-up: there is no $python here. Install Python 3.11 or newer (Debian: apt-get install python3), or name one: make PYTHON=python3.12 ..."
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "set-up: $python is $("$python" --version), and OrbitKV needs Python 3.11 or newer. Name another: make PYTHON=python3.12 ..."
    exit 1
fi

missing=()
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$("$python" -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')")
if [ "${1:-}" = engine ]; then
    # vLLM's CPU kernels are linked against it, and its wheel does not carry it
    ldconfig=$(command -v ldconfig || echo /sbin/ldconfig)
    "$ldconfig" -p | grep 'libnuma\.so\.1' > /dev/null || missing+=(libnuma1)
fi
if [ "${1:-}" = cluster ]; then
    PATH=$PATH:/usr/sbin:/sbin
    for needed in etcd:etcd-server runc iptables conntrack buildah debootstrap curl ip:iproute2 sysctl:procps setpriv:util-linux tcc:tcc; do
        command -v "${needed%%:*}" >/dev/null || missing+=("${needed##*:}")
    done
    [ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
fi
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ]; then
    echo "set-up: Debian packages are missing. Install them and try again:  sudo apt-get install ${missing[*]}"
    exit 1
fi
echo "set-up: installing Debian packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
