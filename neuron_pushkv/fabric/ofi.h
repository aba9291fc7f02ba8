/* Our own declarations of what we use of libfabric, so that building needs no header of it.
 *
 * They are prefixes of the library's structs, as libfabric 1.17 has them; later versions only append. So a struct that
 * the library hands out may be read through them, but must never be allocated by them; those that we hand in are given
 * room (PK_ROOM) and zeroed. Source: include/rdma of libfabric 1.17.0, 2.5.0 and 2.6.0; tests/fabric checks sizes and
 * offsets against the headers of an installed libfabric.
 */
#ifndef PK_OFI_H
#define PK_OFI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PK_ROOM 256

#define FI_VERSION(major, minor) ((uint32_t)(major) << 16 | (uint32_t)(minor))

#define FI_MSG (1ULL << 1)
#define FI_RMA (1ULL << 2)
#define FI_READ (1ULL << 8)
#define FI_WRITE (1ULL << 9)
#define FI_RECV (1ULL << 10)
#define FI_SEND (1ULL << 11)
#define FI_TRANSMIT FI_SEND
#define FI_REMOTE_READ (1ULL << 12)
#define FI_REMOTE_WRITE (1ULL << 13)
#define FI_REMOTE_CQ_DATA (1ULL << 17)
#define FI_DELIVERY_COMPLETE (1ULL << 28)
#define FI_MR_DMABUF (1ULL << 40) /* for fi_mr_regattr; from 1.20 on */
#define FI_HMEM (1ULL << 47)
#define FI_SOURCE (1ULL << 57)
#define FI_CONTEXT (1ULL << 59)
#define FI_CONTEXT2 (1ULL << 52)

#define FI_MR_LOCAL (1 << 2)
#define FI_MR_VIRT_ADDR (1 << 4)
#define FI_MR_ALLOCATED (1 << 5)
#define FI_MR_PROV_KEY (1 << 6)
#define FI_MR_HMEM (1 << 10)

enum { FI_EP_RDM = 3 };
enum { FI_AV_TABLE = 2 };
enum { FI_CQ_FORMAT_DATA = 3 };
enum { FI_WAIT_NONE = 0, FI_WAIT_FD = 3 };
enum { FI_THREAD_DOMAIN = 3 };
enum { FI_GETWAIT = 5, FI_ENABLE = 6 };
enum { FI_HMEM_SYSTEM = 0, FI_HMEM_CUDA = 1, FI_HMEM_NEURON = 4 };
enum { FI_HMEM_P2P_REQUIRED = 1 };
enum { FI_OPT_ENDPOINT = 0 };
enum { FI_OPT_FI_HMEM_P2P = 8, FI_OPT_CUDA_API_PERMITTED = 10, FI_OPT_SHARED_MEMORY_PERMITTED = 11 };
enum {
    FI_EAGAIN = 11,
    FI_ENOMEM = 12,
    FI_EINVAL = 22,
    FI_ENOSYS = 38,
    FI_ENODATA = 61,
    FI_ENOPROTOOPT = 92,
    FI_EAVAIL = 259
};

typedef uint64_t fi_addr_t;

struct fid;
struct fid_fabric;
struct fid_domain;
struct fid_ep;
struct fid_cq;
struct fid_av;
struct fid_mr;

struct fi_ops {
    size_t size;
    int (*close)(struct fid *fid);
    int (*bind)(struct fid *fid, struct fid *other, uint64_t flags);
    int (*control)(struct fid *fid, int command, void *arg);
};

struct fid {
    size_t fclass;
    void *context;
    struct fi_ops *ops;
};

struct fi_tx_attr {
    uint64_t caps;
    uint64_t mode;
    uint64_t op_flags;
    uint64_t msg_order;
    uint64_t comp_order;
    size_t inject_size;
    size_t size;
};

struct fi_ep_attr {
    int type;
    uint32_t protocol;
    uint32_t protocol_version;
    size_t max_msg_size;
};

struct fi_domain_attr {
    struct fid_domain *domain;
    char *name;
    int threading;
    int control_progress;
    int data_progress;
    int resource_mgmt;
    int av_type;
    int mr_mode;
    size_t mr_key_size;
    size_t cq_data_size;
};

struct fi_fabric_attr {
    struct fid_fabric *fabric;
    char *name;
    char *prov_name;
    uint32_t prov_version;
    uint32_t api_version;
};

struct fi_info {
    struct fi_info *next;
    uint64_t caps;
    uint64_t mode;
    uint32_t addr_format;
    size_t src_addrlen;
    size_t dest_addrlen;
    void *src_addr;
    void *dest_addr;
    void *handle;
    struct fi_tx_attr *tx_attr;
    void *rx_attr;
    struct fi_ep_attr *ep_attr;
    struct fi_domain_attr *domain_attr;
    struct fi_fabric_attr *fabric_attr;
};

struct fi_ops_fabric {
    size_t size;
    int (*domain)(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context);
    void *passive_ep;
    void *eq_open;
    void *wait_open;
    int (*trywait)(struct fid_fabric *fabric, struct fid **fids, int count);
};

struct fid_fabric {
    struct fid fid;
    struct fi_ops_fabric *ops;
};

struct fi_av_attr {
    int type;
    int rx_ctx_bits;
    size_t count;
};

struct fi_cq_attr {
    size_t size;
    uint64_t flags;
    int format;
    int wait_obj;
};

struct fi_ops_domain {
    size_t size;
    int (*av_open)(struct fid_domain *domain, void *attr, struct fid_av **av, void *context);
    int (*cq_open)(struct fid_domain *domain, void *attr, struct fid_cq **cq, void *context);
    int (*endpoint)(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context);
};

/* From 1.20 on. The memory begins at base_addr + offset, and offset bytes into what fd stands for. */
struct fi_mr_dmabuf {
    int fd;
    uint64_t offset;
    size_t len;
    void *base_addr;
};

struct fi_mr_attr {
    union {
        const struct iovec *mr_iov;
        const struct fi_mr_dmabuf *dmabuf;
    };
    size_t iov_count;
    uint64_t access;
    uint64_t offset;
    uint64_t requested_key;
    void *context;
    size_t auth_key_size;
    uint8_t *auth_key;
    int iface;
    union {
        uint64_t reserved;
        int cuda;
        int neuron;
    } device;
};

struct fi_ops_mr {
    size_t size;
    void *reg;
    void *regv;
    int (*regattr)(struct fid *fid, const void *attr, uint64_t flags, struct fid_mr **mr);
};

struct fid_domain {
    struct fid fid;
    struct fi_ops_domain *ops;
    struct fi_ops_mr *mr;
};

struct fid_mr {
    struct fid fid;
    void *mem_desc;
    uint64_t key;
};

struct fi_ops_cm {
    size_t size;
    void *setname;
    int (*getname)(struct fid *fid, void *address, size_t *size);
};

struct fi_ops_rma {
    size_t size;
    ssize_t (*read)(struct fid_ep *ep, void *buffer, size_t length, void *desc, fi_addr_t source, uint64_t address,
                    uint64_t key, void *context);
    void *readv;
    void *readmsg;
    ssize_t (*write)(struct fid_ep *ep, const void *buffer, size_t length, void *desc, fi_addr_t destination,
                     uint64_t address, uint64_t key, void *context);
    void *writev;
    void *writemsg;
    void *inject;
    ssize_t (*writedata)(struct fid_ep *ep, const void *buffer, size_t length, void *desc, uint64_t data,
                         fi_addr_t destination, uint64_t address, uint64_t key, void *context);
};

struct fi_ops_ep {
    size_t size;
    void *cancel;
    void *getopt;
    int (*setopt)(struct fid *fid, int level, int name, const void *value, size_t size);
};

struct fid_ep {
    struct fid fid;
    struct fi_ops_ep *ops;
    struct fi_ops_cm *cm;
    void *msg;
    struct fi_ops_rma *rma;
};

struct fi_cq_data_entry {
    void *op_context;
    uint64_t flags;
    size_t len;
    void *buf;
    uint64_t data;
};

struct fi_cq_err_entry {
    void *op_context;
    uint64_t flags;
    size_t len;
    void *buf;
    uint64_t data;
    uint64_t tag;
    size_t olen;
    int err;
    int prov_errno;
    void *err_data;
    size_t err_data_size;
};

struct fi_ops_cq {
    size_t size;
    ssize_t (*read)(struct fid_cq *cq, void *entries, size_t count);
    void *readfrom;
    ssize_t (*readerr)(struct fid_cq *cq, void *entry, uint64_t flags);
    void *sread;
    void *sreadfrom;
    void *signal;
    const char *(*strerror)(struct fid_cq *cq, int prov_errno, const void *err_data, char *text, size_t size);
};

struct fid_cq {
    struct fid fid;
    struct fi_ops_cq *ops;
};

struct fi_ops_av {
    size_t size;
    int (*insert)(struct fid_av *av, const void *address, size_t count, fi_addr_t *out, uint64_t flags, void *context);
};

struct fid_av {
    struct fid fid;
    struct fi_ops_av *ops;
};

#endif
