"""What is used of libnrt's C interface, for cffi. A test compiles it against the public headers where these are.

From aws-neuron/aws-neuron-sdk, ``src/libnrt/include``: ``nrt/nrt.h``, ``nrt/nrt_status.h``, ``nrt/nrt_version.h``,
``nrt/nrt_experimental.h`` and ``ndl/neuron_driver_shared_tensor_batch_op.h``, as of August 2026 (runtime 2.34). The
one exception is ``nrt_get_dmabuf_fd_v2``, which is in no public header: its signature is the one that libfabric 2.5
calls it by (ofiwg/libfabric, ``src/hmem_neuron.c``).

Of the asynchronous interface (``nrta_*``) nothing is used; ``steps.py`` says why.
"""

from __future__ import annotations

from typing import Any

from cffi import FFI

CDEF = """
typedef enum {
    NRT_SUCCESS = 0, NRT_FAILURE = 1, NRT_INVALID = 2, NRT_INVALID_HANDLE = 3, NRT_RESOURCE = 4, NRT_TIMEOUT = 5,
    NRT_HW_ERROR = 6, NRT_QUEUE_FULL = 7, NRT_LOAD_NOT_ENOUGH_NC = 9, NRT_UNSUPPORTED_NEFF_VERSION = 10,
    NRT_FAIL_HOST_MEM_ALLOC = 11, NRT_UNINITIALIZED = 13, NRT_CLOSED = 14, NRT_QUEUE_EMPTY = 15,
    NRT_EXEC_UNIT_UNRECOVERABLE = 101, NRT_EXEC_BAD_INPUT = 1002, NRT_EXEC_COMPLETED_WITH_NUM_ERR = 1003,
    NRT_EXEC_COMPLETED_WITH_ERR = 1004, NRT_EXEC_NC_BUSY = 1005, NRT_EXEC_OOB = 1006, NRT_COLL_PENDING = 1100,
    NRT_EXEC_HW_ERR_COLLECTIVES = 1200, NRT_EXEC_HW_ERR_HBM_UE = 1201, NRT_EXEC_HW_ERR_NC_UE = 1202,
    NRT_EXEC_HW_ERR_DMA_ABORT = 1203, NRT_EXEC_SW_NQ_OVERFLOW = 1204, NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE = 1205,
    NRT_NETWORK_PROXY_FAILURE = 1206
} NRT_STATUS;
typedef enum {
    NRT_TENSOR_PLACEMENT_DEVICE = 0, NRT_TENSOR_PLACEMENT_HOST = 1, NRT_TENSOR_PLACEMENT_VIRTUAL = 2
} nrt_tensor_placement_t;
typedef enum { NRT_FRAMEWORK_TYPE_INVALID = 0, NRT_FRAMEWORK_TYPE_NO_FW = 1 } nrt_framework_type_t;
enum {
    NRT_INSTANCE_UNKNOWN = 0, NRT_INSTANCE_INF1 = 1, NRT_INSTANCE_TRN1 = 2, NRT_INSTANCE_TRN1N = 3,
    NRT_INSTANCE_INF2 = 4, NRT_INSTANCE_TRN2 = 5, NRT_INSTANCE_TRN2N = 6, NRT_INSTANCE_INF2E = 7,
    NRT_INSTANCE_TRN2P = 8, NRT_INSTANCE_TRN2U = 9, NRT_INSTANCE_TRN2E = 10, NRT_INSTANCE_TRN2EU = 11,
    NRT_INSTANCE_TRN2AC = 12, NRT_INSTANCE_TRN2UAC = 13, NRT_INSTANCE_TRN3 = 14, NRT_INSTANCE_TRN3PDS98 = 15
};

typedef struct nrt_tensor nrt_tensor_t;
typedef struct nrt_tensor_batch_op { uint64_t offset; uint64_t size; void *buffer; } nrt_tensor_batch_op_t;
typedef struct nrt_tensor_batch {
    const nrt_tensor_t *tensor; const nrt_tensor_batch_op_t *ops; uint32_t num_ops;
} nrt_tensor_batch_t;
typedef struct nrt_instance_info {
    uint32_t family; uint32_t size; char arch_name[16]; char device_revision[8];
} nrt_instance_info_t;
typedef struct nrt_vnc_memory_stats { size_t bytes_used; size_t bytes_limit; } nrt_vnc_memory_stats_t;
typedef struct nrt_version {
    uint64_t rt_major; uint64_t rt_minor; uint64_t rt_patch; uint64_t rt_maintenance; char rt_detail[128];
    char git_hash[64];
} nrt_version_t;

NRT_STATUS nrt_init(nrt_framework_type_t framework, const char *fw_version, const char *fal_version);
void nrt_close(void);
NRT_STATUS nrt_get_total_vnc_count(uint32_t *vnc_count);
NRT_STATUS nrt_get_visible_vnc_count(uint32_t *vnc_count);
NRT_STATUS nrt_get_version(nrt_version_t *ver, size_t size);
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t *info, size_t instance_info_len);
NRT_STATUS nrt_get_vnc_memory_stats(
    uint32_t vnc, nrt_vnc_memory_stats_t *stats, size_t stats_size_in, size_t *stats_size_out);
NRT_STATUS nrt_host_device_id_get(int neuron_dev, uint32_t *host_device_id);

NRT_STATUS nrt_tensor_allocate(
    nrt_tensor_placement_t tensor_placement, int vnc, size_t size, const char *name, nrt_tensor_t **tensor);
NRT_STATUS nrt_tensor_allocate_slice(
    const nrt_tensor_t *tensor_source, size_t offset, size_t size, const char *name, nrt_tensor_t **tensor_slice);
void nrt_tensor_free(nrt_tensor_t **tensor);
void *nrt_tensor_get_va(const nrt_tensor_t *tensor);
NRT_STATUS nrt_tensor_memset(nrt_tensor_t *tensor, uint64_t offset, int value, size_t size);
NRT_STATUS nrt_tensor_copy(
    const nrt_tensor_t *src, size_t src_offset, nrt_tensor_t *dst, size_t dst_offset, size_t size);
NRT_STATUS nrt_tensor_read(const nrt_tensor_t *tensor, void *buf, size_t offset, size_t size);
NRT_STATUS nrt_tensor_write(nrt_tensor_t *tensor, const void *buf, size_t offset, size_t size);
NRT_STATUS nrt_tensor_read_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches, bool unsafe);
NRT_STATUS nrt_tensor_write_batch(const nrt_tensor_batch_t *batches, uint64_t num_batches, bool unsafe);
NRT_STATUS nrt_memcpy_to_device(void *dest, const void *src, size_t size);

NRT_STATUS nrt_get_dmabuf_fd(uint64_t va, uint64_t size, int *fd);
NRT_STATUS nrt_get_dmabuf_fd_v2(uint64_t va, uint64_t size, int *fd, uint64_t *offset);
NRT_STATUS nrt_get_attached_efa_bdf(const void *va, char *efa_bdf, size_t *len);
"""

OPTIONAL = frozenset(
    {
        "nrt_get_version",
        "nrt_get_instance_info",
        "nrt_get_vnc_memory_stats",
        "nrt_host_device_id_get",
        "nrt_tensor_read_batch",
        "nrt_tensor_write_batch",
        "nrt_memcpy_to_device",
        "nrt_get_dmabuf_fd",
        "nrt_get_dmabuf_fd_v2",
        "nrt_get_attached_efa_bdf",
    }
)
"""Functions that some runtimes have not got: each caller does without, or says what is missing."""

REQUIRED = (
    "nrt_init",
    "nrt_close",
    "nrt_get_total_vnc_count",
    "nrt_get_visible_vnc_count",
    "nrt_tensor_allocate",
    "nrt_tensor_allocate_slice",
    "nrt_tensor_free",
    "nrt_tensor_get_va",
    "nrt_tensor_memset",
    "nrt_tensor_copy",
    "nrt_tensor_read",
    "nrt_tensor_write",
)

ffi: Any = FFI()
ffi.cdef(CDEF)
