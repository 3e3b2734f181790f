/* A CUDA driver whose devices' memory is this host's: what kernels/gpu/driver.py calls, with the types of cuda.h.
 *
 * An allocation is a range of a memfd that host_allocation told of. A handle names its process, its descriptor and its
 * size; to open it is to map the same memfd, read only, so memory really is shared between processes and a mapping
 * really goes away. Three devices: 0 can read 1 and not 2. Whoever asks for memory without a context, before cuInit or
 * with a handle that is none is told so. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { char bytes[16]; } CUuuid;

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
       INVALID_CONTEXT = 201, MAP_FAILED_ = 205, INVALID_HANDLE = 400 };
enum { DEVICES = 3, MOST = 64, IS_LEGACY_CUDA_IPC_CAPABLE = 10 };
static const char MAGIC[8] = "hostipc";

struct handle { char magic[8]; int64_t pid, fd, size; };
struct allocation { CUdeviceptr base; uint64_t size; int fd, shared, uses; struct handle from; };

static struct allocation allocations[MOST];
static int initialized, retained, depth;

/* ---- for the tests */

void host_allocation(CUdeviceptr base, uint64_t size, int fd, int shared) {
    for (int i = 0; i < MOST; i++)
        if (!allocations[i].size) {
            allocations[i] = (struct allocation){.base = base, .size = size, .fd = fd, .shared = shared};
            return;
        }
}

void host_free(CUdeviceptr base) {
    for (int i = 0; i < MOST; i++)
        if (allocations[i].size && allocations[i].base == base) allocations[i].size = 0;
}

/* Contexts that are held or current: 0 between calls. */
int host_contexts(void) { return retained + depth; }

/* ---- the driver */

static struct allocation *holding(CUdeviceptr address) {
    for (int i = 0; i < MOST; i++) {
        struct allocation *one = &allocations[i];
        if (one->size && address >= one->base && address < one->base + one->size) return one;
    }
    return NULL;
}

CUresult cuInit(unsigned int flags) { initialized = !flags; return flags ? INVALID_VALUE : SUCCESS; }

CUresult cuGetErrorString(CUresult error, const char **words) {
    switch (error) {
    case INVALID_VALUE: *words = "invalid argument"; return SUCCESS;
    case OUT_OF_MEMORY: *words = "out of memory"; return SUCCESS;
    case INVALID_DEVICE: *words = "invalid device ordinal"; return SUCCESS;
    case INVALID_CONTEXT: *words = "invalid device context"; return SUCCESS;
    case MAP_FAILED_: *words = "mapping of buffer object failed"; return SUCCESS;
    case INVALID_HANDLE: *words = "invalid resource handle"; return SUCCESS;
    default: *words = NULL; return INVALID_VALUE;
    }
}

CUresult cuDeviceGetCount(int *count) { *count = DEVICES; return initialized ? SUCCESS : NOT_INITIALIZED; }

/* A CUdevice is not its number: who mixes them up is found out. */
CUresult cuDeviceGet(CUdevice *device, int number) {
    if (!initialized) return NOT_INITIALIZED;
    *device = number + 100;
    return number >= 0 && number < DEVICES ? SUCCESS : INVALID_DEVICE;
}

static int is_device(CUdevice device) { return device >= 100 && device < 100 + DEVICES; }

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    if (!is_device(device)) return INVALID_DEVICE;
    memcpy(uuid->bytes, "host device no. ", 16);
    uuid->bytes[15] = (char)('0' + device - 100);
    return SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    if (!is_device(device) || !is_device(peer)) return INVALID_DEVICE;
    *can = device - peer == 1 || peer - device == 1;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device) {
    if (!is_device(device)) return INVALID_DEVICE;
    *context = (void *)(uintptr_t)(0x100000000u + (unsigned)device);
    retained++;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    if (!is_device(device) || !retained) return INVALID_CONTEXT;
    retained--;
    return SUCCESS;
}

CUresult cuCtxPushCurrent_v2(void *context) {
    if ((uintptr_t)context >> 32 != 1) return INVALID_CONTEXT;
    depth++;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    depth--;
    *context = NULL;
    return SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    struct allocation *one = holding(address);
    if (!one || attribute != IS_LEGACY_CUDA_IPC_CAPABLE) return INVALID_VALUE;
    *(unsigned int *)data = one->shared;
    return SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    if (!depth) return INVALID_CONTEXT;
    struct allocation *one = holding(address);
    if (!one) return INVALID_VALUE;
    *base = one->base;
    *size = one->size;
    return SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr base) {
    if (!depth) return INVALID_CONTEXT;
    struct allocation *one = holding(base);
    if (!one || one->base != base || !one->shared) return INVALID_VALUE;
    struct handle made = {.pid = getpid(), .fd = one->fd, .size = (int64_t)one->size};
    memcpy(made.magic, MAGIC, sizeof made.magic);
    memset(handle, 0xee, sizeof *handle);
    memcpy(handle->reserved, &made, sizeof made);
    return SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *base, CUipcMemHandle handle, unsigned int flags) {
    if (!depth) return INVALID_CONTEXT;
    if (flags != 1) return INVALID_VALUE;
    struct handle asked;
    memcpy(&asked, handle.reserved, sizeof asked);
    if (memcmp(asked.magic, MAGIC, sizeof MAGIC)) return INVALID_HANDLE;
    for (size_t i = sizeof asked; i < sizeof handle.reserved; i++)
        if (handle.reserved[i] != (char)0xee) return INVALID_HANDLE;
    for (int i = 0; i < MOST; i++)
        if (allocations[i].size && allocations[i].uses && !memcmp(&allocations[i].from, &asked, sizeof asked)) {
            allocations[i].uses++;
            *base = allocations[i].base;
            return SUCCESS;
        }
    char path[64];
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)asked.pid, (long long)asked.fd);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat there;
    if (fd < 0) return INVALID_HANDLE;
    if (fstat(fd, &there) || there.st_size < asked.size) { close(fd); return MAP_FAILED_; }
    void *memory = mmap(NULL, (size_t)asked.size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED) return MAP_FAILED_;
    *base = (CUdeviceptr)(uintptr_t)memory;
    for (int i = 0; i < MOST; i++)
        if (!allocations[i].size) {
            allocations[i] =
                (struct allocation){.base = *base, .size = (uint64_t)asked.size, .fd = -1, .uses = 1, .from = asked};
            return SUCCESS;
        }
    munmap(memory, (size_t)asked.size);
    return OUT_OF_MEMORY;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr base) {
    if (!depth) return INVALID_CONTEXT;
    struct allocation *one = holding(base);
    if (!one || one->base != base || !one->uses) return INVALID_VALUE;
    if (!--one->uses) {
        munmap((void *)(uintptr_t)base, (size_t)one->size);
        one->size = 0;
    }
    return SUCCESS;
}
