/* A stand-in for the Neuron runtime's libnrt.so.1.
 *
 * "Device" memory is a memfd for each tensor, so that it has real addresses, can be written to by a network, and can be
 * exported as a real descriptor. It is mapped only if NEURON_RT_MAP_HBM is 1 when the runtime is initialised, and only
 * that way has an address. Calls fail as the real ones do: before nrt_init, after nrt_close, in a forked child, beyond
 * a tensor's end, with no memory left, between cores.
 *
 * Compiled against libnrt's public headers with -DPUBLIC_HEADERS, else against our own declarations of them
 * (declared.h, written by the test). -DOLD leaves out what older runtimes have not got, -DDMABUF_V2 adds the function
 * that newer ones have. What a test may choose in the environment: FAKE_NRT_CORES, FAKE_NRT_HBM (bytes for each core),
 * FAKE_NRT_FAMILY, FAKE_NRT_BDF, FAKE_NRT_SKEW (bytes that addresses are off a multiple of 2 MiB),
 * FAKE_NRT_DMABUF ("invalid": the fault of runtime 2.32.31; "resource").
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
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
#include "nrt/nrt.h"
#include "nrt/nrt_experimental.h"
#include "nrt/nrt_version.h"
#else
#include "declared.h"
#endif

#define EXPORT __attribute__((visibility("default")))
#define ALIGNMENT ((size_t)2 << 20)
#define MOST_CORES 256

enum state { START, READY, CHILD, CLOSED };

/* What tensors and their slices share. */
struct storage {
    struct storage *next;
    int references, vnc, fd; /* fd: -1 for host memory */
    size_t size;
    unsigned char *address; /* NULL where HBM is not mapped */
    void *place;            /* what is unmapped in the end */
    size_t room;
};

struct nrt_tensor {
    struct storage *storage;
    size_t offset, size;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static enum state state;
static bool map_hbm;
static uint32_t visible;
static int init_calls;
static size_t used[MOST_CORES];
static struct storage *storages;

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text != NULL && *text != 0 ? strtoull(text, NULL, 0) : otherwise;
}

static void in_child(void) {
    state = CHILD;
}

static NRT_STATUS gate(void) {
    return state == READY ? NRT_SUCCESS : state == START ? NRT_UNINITIALIZED : state == CLOSED ? NRT_CLOSED : NRT_FAILURE;
}

/* "0,4-7" names five cores. */
static uint32_t named(const char *text) {
    uint32_t count = 0;
    while (*text != 0) {
        char *end;
        unsigned long first = strtoul(text, &end, 10), last = first;
        if (end == text)
            return 0;
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        count += (uint32_t)(last - first + 1);
        text = *end == ',' ? end + 1 : end;
    }
    return count;
}

/* Life. */

EXPORT NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *fw_version, const char *fal_version) {
    const char *cores = getenv("NEURON_RT_VISIBLE_CORES"), *mapped = getenv("NEURON_RT_MAP_HBM");
    init_calls++;
    if (framework == NRT_FRAMEWORK_TYPE_INVALID || fw_version == NULL || fal_version == NULL)
        return NRT_INVALID;
    if (state == READY)
        return NRT_SUCCESS;
    if (state != START)
        return gate();
    uint32_t total = (uint32_t)number("FAKE_NRT_CORES", 64);
    visible = cores != NULL && *cores != 0 ? named(cores) : (uint32_t)number("NEURON_RT_NUM_CORES", 0);
    if (visible == 0)
        visible = total;
    if (visible > total || visible > MOST_CORES)
        return NRT_INVALID;
    map_hbm = mapped != NULL && strcmp(mapped, "1") == 0;
    if (pthread_atfork(NULL, NULL, in_child) != 0)
        return NRT_RESOURCE;
    state = READY;
    return NRT_SUCCESS;
}

EXPORT void nrt_close(void) {
    if (state == READY || state == CHILD)
        state = CLOSED;
}

EXPORT NRT_STATUS nrt_get_total_vnc_count(uint32_t *vnc_count) {
    *vnc_count = (uint32_t)number("FAKE_NRT_CORES", 64);
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_get_total_nc_count(uint32_t *vnc_count);
EXPORT NRT_STATUS nrt_get_total_nc_count(uint32_t *vnc_count) { /* What libfabric calls. */
    return nrt_get_total_vnc_count(vnc_count);
}

EXPORT NRT_STATUS nrt_get_visible_vnc_count(uint32_t *vnc_count) {
    *vnc_count = state == READY ? visible : (uint32_t)number("FAKE_NRT_CORES", 64);
    return NRT_SUCCESS;
}

/* Memory. */

static void release(struct storage *storage) {
    if (--storage->references > 0)
        return;
    for (struct storage **link = &storages; *link != NULL; link = &(*link)->next) {
        if (*link == storage) {
            *link = storage->next;
            break;
        }
    }
    if (storage->fd >= 0) {
        used[storage->vnc] -= storage->size;
        close(storage->fd);
    }
    if (storage->place != NULL)
        munmap(storage->place, storage->room);
    free(storage);
}

static NRT_STATUS map(struct storage *storage) {
    size_t skew = (size_t)number("FAKE_NRT_SKEW", 0);
    storage->room = storage->size + ALIGNMENT + skew;
    storage->place = mmap(NULL, storage->room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (storage->place == MAP_FAILED) {
        storage->place = NULL;
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
    uintptr_t start = ((uintptr_t)storage->place + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + skew;
    int flags = MAP_FIXED | (storage->fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
    void *mapped = mmap((void *)start, storage->size, PROT_READ | PROT_WRITE, flags, storage->fd, 0);
    if (mapped == MAP_FAILED)
        return NRT_FAIL_HOST_MEM_ALLOC;
    storage->address = mapped;
    return NRT_SUCCESS;
}

/* Device memory holds whatever was there before. */
static bool littered(struct storage *storage) {
    unsigned char litter[1 << 16];
    memset(litter, 0xa5, sizeof litter);
    for (size_t done = 0; done < storage->size;) {
        size_t rest = storage->size - done;
        ssize_t count = pwrite(storage->fd, litter, rest < sizeof litter ? rest : sizeof litter, (off_t)done);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return false;
        done += (size_t)count;
    }
    return true;
}

static NRT_STATUS fill(struct storage *storage, nrt_tensor_placement_t placement, int vnc, size_t size) {
    storage->references = 1;
    storage->size = size;
    storage->fd = -1;
    if (placement == NRT_TENSOR_PLACEMENT_HOST)
        return map(storage);
    if (used[vnc] + size > number("FAKE_NRT_HBM", (uint64_t)1 << 30))
        return NRT_RESOURCE;
    storage->vnc = vnc;
    storage->fd = memfd_create("neuron-hbm", MFD_CLOEXEC);
    if (storage->fd < 0)
        return NRT_RESOURCE;
    used[vnc] += size;
    if (!littered(storage))
        return NRT_RESOURCE;
    return map_hbm ? map(storage) : NRT_SUCCESS;
}

static NRT_STATUS made(struct storage *storage, size_t offset, size_t size, nrt_tensor_t **tensor) {
    *tensor = calloc(1, sizeof **tensor);
    if (*tensor == NULL)
        return NRT_FAIL_HOST_MEM_ALLOC;
    **tensor = (struct nrt_tensor){storage, offset, size};
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_tensor_allocate(
    nrt_tensor_placement_t tensor_placement, int vnc, size_t size, const char *name, nrt_tensor_t **tensor) {
    (void)name;
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    bool host = tensor_placement == NRT_TENSOR_PLACEMENT_HOST;
    if (size == 0 || (!host && (tensor_placement != NRT_TENSOR_PLACEMENT_DEVICE || vnc < 0 || (uint32_t)vnc >= visible)))
        return NRT_INVALID;
    struct storage *storage = calloc(1, sizeof *storage);
    if (storage == NULL)
        return NRT_FAIL_HOST_MEM_ALLOC;
    pthread_mutex_lock(&lock);
    status = fill(storage, tensor_placement, vnc, size);
    if (status == NRT_SUCCESS)
        status = made(storage, 0, size, tensor);
    if (status == NRT_SUCCESS) {
        storage->next = storages;
        storages = storage;
    } else {
        release(storage);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static bool inside(const nrt_tensor_t *tensor, uint64_t offset, uint64_t size) {
    return offset <= tensor->size && size <= tensor->size - offset;
}

EXPORT NRT_STATUS nrt_tensor_allocate_slice(
    const nrt_tensor_t *tensor_source, size_t offset, size_t size, const char *name, nrt_tensor_t **tensor_slice) {
    (void)name;
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    if (tensor_source == NULL || size == 0 || !inside(tensor_source, offset, size))
        return NRT_INVALID;
    pthread_mutex_lock(&lock);
    status = made(tensor_source->storage, tensor_source->offset + offset, size, tensor_slice);
    if (status == NRT_SUCCESS)
        tensor_source->storage->references++;
    pthread_mutex_unlock(&lock);
    return status;
}

EXPORT void nrt_tensor_free(nrt_tensor_t **tensor) {
    if (tensor == NULL || *tensor == NULL)
        return;
    pthread_mutex_lock(&lock);
    release((*tensor)->storage);
    pthread_mutex_unlock(&lock);
    free(*tensor);
    *tensor = NULL;
}

EXPORT void *nrt_tensor_get_va(const nrt_tensor_t *tensor) {
    return tensor == NULL || tensor->storage->address == NULL ? NULL : tensor->storage->address + tensor->offset;
}

/* Copies go through the memfd, which works whether it is mapped or not. */
static NRT_STATUS move(const nrt_tensor_t *tensor, void *buffer, uint64_t offset, uint64_t size, bool writes) {
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    if (tensor == NULL || buffer == NULL || !inside(tensor, offset, size))
        return NRT_INVALID;
    struct storage *storage = tensor->storage;
    uint64_t at = tensor->offset + offset;
    if (storage->fd < 0) {
        memcpy(writes ? storage->address + at : buffer, writes ? buffer : storage->address + at, size);
        return NRT_SUCCESS;
    }
    for (uint64_t done = 0; done < size;) {
        unsigned char *host = (unsigned char *)buffer + done;
        off_t place = (off_t)(at + done);
        ssize_t count = writes ? pwrite(storage->fd, host, size - done, place) : pread(storage->fd, host, size - done, place);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return NRT_EXEC_HW_ERR_DMA_ABORT;
        done += (uint64_t)count;
    }
    return NRT_SUCCESS;
}

EXPORT NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buf, size_t offset, size_t size) {
    return move(tensor, buf, offset, size, false);
}

EXPORT NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buf, size_t offset, size_t size) {
    return move(tensor, (void *)(uintptr_t)buf, offset, size, true);
}

EXPORT NRT_STATUS nrt_tensor_memset(nrt_tensor_t *tensor, uint64_t offset, int value, size_t size) {
    unsigned char page[4096];
    NRT_STATUS status = gate();
    memset(page, value, sizeof page);
    if (status == NRT_SUCCESS && (tensor == NULL || !inside(tensor, offset, size)))
        return NRT_INVALID;
    for (size_t done = 0; status == NRT_SUCCESS && done < size; done += sizeof page) {
        size_t count = size - done < sizeof page ? size - done : sizeof page;
        status = move(tensor, page, offset + done, count, true);
    }
    return status;
}

EXPORT NRT_STATUS nrt_tensor_copy(
    const nrt_tensor_t *src, size_t src_offset, nrt_tensor_t *dst, size_t dst_offset, size_t size) {
    NRT_STATUS status = gate();
    if (status != NRT_SUCCESS)
        return status;
    if (src == NULL || dst == NULL || !inside(src, src_offset, size) || !inside(dst, dst_offset, size))
        return NRT_INVALID;
    if (src->storage->fd >= 0 && dst->storage->fd >= 0 && src->storage->vnc != dst->storage->vnc)
        return NRT_INVALID;
    unsigned char *buffer = malloc(size == 0 ? 1 : size);
    if (buffer == NULL)
        return NRT_FAIL_HOST_MEM_ALLOC;
    status = move(src, buffer, src_offset, size, false);
    if (status == NRT_SUCCESS)
        status = move(dst, buffer, dst_offset, size, true);
    free(buffer);
    return status;
}

/* The device tensor's storage that holds these bytes of mapped memory. */
static struct storage *mapped_at(uint64_t address, uint64_t size) {
    struct storage *found = NULL;
    pthread_mutex_lock(&lock);
    for (struct storage *each = storages; each != NULL && found == NULL; each = each->next) {
        uint64_t start = (uint64_t)(uintptr_t)each->address;
        bool holds = each->fd >= 0 && start != 0 && start <= address && address - start <= each->size;
        if (holds && size <= each->size - (address - start))
            found = each;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

#include "libnrt_more.h"
