#!/bin/sh
# An environment in which NIXL's LIBFABRIC backend, the one that EFA uses, runs without EFA: over libfabric's TCP provider.
#   libfabric_env.sh [PYTHON] [FOLDER]
# PYTHON: one with numpy, and torch for CUDA's runtime library (default: python3). FOLDER: default build/libfabric.
# NIXL 1.4.1, as 1.5 needs a newer libfabric than any package has; libfabric itself comes from the mpich wheel. There is no
# CUDA driver: a libcuda of four functions says so.
set -eu
base=${1:-python3}
out=${2:-build/libfabric}
mkdir -p "$out/lib"
out=$(cd "$out" && pwd)
"$base" -m venv "$out/venv"
"$out/venv/bin/python" -m pip install --quiet --no-deps nixl==1.4.1 nixl-cu13==1.4.1 mpich==5.0.2
"$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$out/venv/bin/python" -c \
  'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
if ! ldconfig -p | grep -q 'libhwloc\.so\.15'; then
  (cd "$out" && apt-get download -qq libhwloc15 && dpkg-deb -x libhwloc15*.deb hwloc)
  cp -P "$out"/hwloc/usr/lib/*/libhwloc.so.15* "$out/lib/"
fi
cat >"$out/libcuda.c" <<'C'
int cuInit(unsigned flags) { return 100; }
int cuCtxSetCurrent(void *context) { return 100; }
int cuDeviceGetPCIBusId(char *text, int size, int device) { return 100; }
int cuPointerGetAttributes(unsigned count, void *what, void **data, unsigned long long pointer) { return 100; }
C
cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$out/lib/libcuda.so.1" "$out/libcuda.c"
cuda=$("$base" -c 'import importlib.util, pathlib
print(next(p for root in importlib.util.find_spec("nvidia").submodule_search_locations
           for p in pathlib.Path(root).glob("*/lib") if list(p.glob("libcudart.so.13"))))')
cat >"$out/run" <<R
#!/bin/sh
LD_LIBRARY_PATH="$out/lib:$out/venv/lib/mpich:$cuda" FI_PROVIDER_PATH="$out/venv/lib/mpich/libfabric" \\
  exec "$out/venv/bin/python" "\$@"
R
chmod +x "$out/run"
"$out/run" -c 'import nixl, sys; sys.exit("nixl 1.4.1 is hidden by another" if "'"$out"'" not in nixl._pkg.__file__ else 0)'
