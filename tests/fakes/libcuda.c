/* A stand-in for the CUDA driver's libcuda.so.1.
 *
 * "Device" memory is a memfd for each allocation, so that it has real addresses and can be exported as a real
 * descriptor. Streams are queues: work that a test has launched on one (fake_launch) ends only when the test says so
 * (fake_finish), and whatever is queued behind it waits. Calls fail as the real ones do: before cuInit, in a forked
 * child, without a current context, for addresses that CUDA doesn't know, with no memory left.
 *
 * What a test may choose in the environment, read by cuInit (defaults are those of an H200): FAKE_CUDA_DEVICES,
 * FAKE_CUDA_MEMORY (bytes), FAKE_CUDA_MAJOR, FAKE_CUDA_ORDERING, FAKE_CUDA_DMABUF, FAKE_CUDA_RDMA,
 * FAKE_CUDA_PCIE (whether the flag of that name is known), FAKE_CUDA_SKEW (bytes that allocations are off a multiple of
 * 2 MiB), FAKE_CUDA_WRITES (stream writes: 1, 0 refused, -1 silently undone), FAKE_CUDA_STUB. -DOLD leaves out what
 * drivers before CUDA 11 have not got, -DV1 the second version of stream writes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef PUBLIC_HEADERS
#include "cuda.h"
#else
#include "declared.h"
#endif

#define EXPORT __attribute__((visibility("default")))
#define LARGE ((size_t)2 << 20)
#define MOST_DEVICES 8
#define MOST_CONTEXTS 16
#define MOST_FDS 1024
#define PAGE ((size_t)4096)

struct CUctx_st {
    int device, retained;
};

enum kind { DEVICE, HOST, MANAGED, VIRTUAL };

/* An allocation. A virtual one is mapped up to ``mapped``, in pieces of ``piece`` bytes. */
struct range {
    struct range *next;
    enum kind kind;
    int device, fd;
    bool rdma, synchronous;
    unsigned char *address;
    size_t size, mapped, piece;
    void *place;
    size_t room;
};

enum action { WORK, WRITE, COPY, CLEAR, RECORD };

struct task {
    struct task *next;
    enum action action;
    bool finished;
    void *to;
    const void *from;
    size_t size;
    uint32_t value;
    struct CUevent_st *event;
};

struct CUstream_st {
    struct task *first, **last;
    struct CUstream_st *next;
};

struct CUevent_st {
    unsigned recorded, reached;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static enum { START, READY, CHILD } state;
static struct CUctx_st contexts[MOST_DEVICES];
static struct range *ranges;
static size_t used;
static struct CUstream_st default_stream = {NULL, &default_stream.first, NULL};
static int streams, events, handles, synchronised, waiting;
static bool fail_marks, unblocked;
static struct { size_t before, size; } exports[MOST_FDS];
static _Thread_local CUcontext stack[MOST_CONTEXTS];
static _Thread_local int depth;
static long long devices, memory, major, ordering, dmabuf, rdma, pcie, skew, writes;

static long long number(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != 0 ? strtoll(text, NULL, 0) : otherwise;
}

static void in_child(void) {
    if (state == READY)
        state = CHILD;
}

static CUresult gate(void) {
    return state == READY ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static CUresult context_gate(void) {
    CUresult status = gate();
    if (status != CUDA_SUCCESS)
        return status;
    return depth > 0 && stack[depth - 1]->retained > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

#define GATE(condition)                                                                                                \
    do {                                                                                                               \
        CUresult gated = condition;                                                                                    \
        if (gated != CUDA_SUCCESS)                                                                                     \
            return gated;                                                                                              \
    } while (0)

/* Devices and contexts. */

EXPORT CUresult cuInit(unsigned int Flags) {
    if (number("FAKE_CUDA_STUB", 0))
        return CUDA_ERROR_STUB_LIBRARY;
    if (Flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (state != START)
        return gate();
    devices = number("FAKE_CUDA_DEVICES", 2);
    memory = number("FAKE_CUDA_MEMORY", 1 << 30);
    major = number("FAKE_CUDA_MAJOR", 9);
    ordering = number("FAKE_CUDA_ORDERING", 0);
    dmabuf = number("FAKE_CUDA_DMABUF", 1);
    rdma = number("FAKE_CUDA_RDMA", 1);
    pcie = number("FAKE_CUDA_PCIE", 1);
    skew = number("FAKE_CUDA_SKEW", 0);
    writes = number("FAKE_CUDA_WRITES", 1);
    if (devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    for (int device = 0; device < MOST_DEVICES; device++)
        contexts[device].device = device;
    if (pthread_atfork(NULL, NULL, in_child) != 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    state = READY;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *driverVersion) {
    *driverVersion = 12080;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    GATE(gate());
    *count = (int)devices;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    GATE(gate());
    if (ordinal < 0 || ordinal >= devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int len, CUdevice dev) {
    GATE(gate());
    snprintf(name, (size_t)len, "Stand-in %d", dev);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev) {
    GATE(gate());
    if (len < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(pciBusId, (size_t)len, "0000:%02X:00.0", 0x5A + dev);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev) {
    GATE(gate());
    if (dev < 0 || dev >= devices)
        return CUDA_ERROR_INVALID_DEVICE;
    switch ((int)attrib) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *pi = (int)major;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *pi = 0;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
        *pi = writes != 0;
        return CUDA_SUCCESS;
#ifndef OLD
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
        *pi = (int)rdma;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
        *pi = (int)ordering;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
        *pi = (int)dmabuf;
        return CUDA_SUCCESS;
#endif
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    GATE(gate());
    contexts[dev].retained++;
    *pctx = &contexts[dev];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    GATE(gate());
    if (contexts[dev].retained == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    contexts[dev].retained--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext ctx) {
    GATE(gate());
    if (ctx == NULL || ctx->retained == 0 || depth == MOST_CONTEXTS)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *pctx) {
    GATE(gate());
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *pctx = stack[--depth];
    return CUDA_SUCCESS;
}

#include "libcuda_memory.h"
#include "libcuda_streams.h"
