/* What there is: the library, rails, memory, peers and operations. See core.h for threads and marks. */
#ifndef PK_THINGS_H
#define PK_THINGS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "api.h"
#include "ofi.h"

#define PK_LINE 64 /* bytes in a line of cache */

typedef struct pk_peer pk_peer;
typedef struct pk_ticket pk_ticket;

/* ---- library.c: finding our way into libfabric ---- */

typedef struct {
    void *handle;
    uint32_t version;
    uint32_t api;  /* the version asked for: the smaller of the library's and ours */
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
                   struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*strerror)(int error);
    char path[1024];
} pk_library;

int pk_library_open(pk_library *library, const pk_options *options, pk_failure *failure);
/* Whether the rails are to serve memory of a device, which of the providers that we use only efa does. */
bool pk_serves_device(const pk_options *options);
/* One info for each rail; infos has room for PK_MOST_RAILS. */
int pk_library_offer(const pk_library *library, const pk_options *options, struct fi_info **infos, uint32_t *count,
                     pk_failure *failure);
/* The network card's name, as the provider has it. */
const char *pk_nic(const struct fi_info *info);
/* Append a name, after a comma if it isn't the first; false when there is no room for it. */
bool pk_append_name(char *text, size_t room, size_t *used, const char *name);
/* Store code and text; returns code. error is a negative libfabric code, or 0 for none. */
int pk_fail(const pk_library *library, pk_failure *failure, int code, const char *what, long error);

/* ---- ids: index and generation, so that an old id never names a new thing ---- */

typedef struct {
    struct pk_entry {
        void *item;
        uint32_t generation;
    } *entries;
    uint32_t size;
} pk_table;

bool pk_table_add(pk_table *table, void *item, uint64_t *id);
void *pk_table_get(const pk_table *table, uint64_t id);
bool pk_table_had(const pk_table *table, uint64_t id);
void pk_table_remove(pk_table *table, uint64_t id);

/* ---- rail.c: what there is once per network card ---- */

typedef struct {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    int wait_fd;  /* -1: the provider has none */
    bool over_rxm;
    bool over_efa;
    int interface; /* of device memory that it serves; FI_HMEM_SYSTEM: none */
    uint32_t depth;
    bool dirty;     /* [progress] writes have arrived since the last flush began */
    bool to_flush;  /* [progress] a read is to be posted for the flush under way */
    uint64_t bytes; /* [lock] of completed writes */
} pk_rail;

/* Memory may be registered in parts of 1 << shift bytes, the last one shorter. */
typedef struct {
    struct fid_mr *mr;
    void *desc;
    uint64_t key;
} pk_part;

typedef struct {
    uint64_t address;
    uint64_t length;
    int interface;
    int device;
    unsigned shift;
    const pk_dmabuf *dmabufs; /* until it is registered */
    uint64_t count;           /* of parts */
    pk_part *parts;           /* rail by rail */
    uint64_t users; /* [lock] spans of tickets under way */
    bool leaving;   /* [lock] takes no new ones */
} pk_memory;

/* A peer's memory. Never changes; lives until its peer is fenced. */
typedef struct pk_target {
    uint64_t id;
    const pk_peer *peer;
    struct pk_target *next; /* of the same peer */
    uint64_t length;
    uint64_t base;     /* remote address of its first byte */
    bool virtual_base; /* or else each part is addressed from 0 */
    unsigned shift;
    uint64_t count;
    uint32_t rails;
    uint64_t keys[]; /* rail by rail */
} pk_target;

typedef enum { PK_OP_FREE, PK_OP_WRITE, PK_OP_WARM_UP, PK_OP_FLUSH } pk_op_kind;

/* One operation under way. The first 64 bytes are the provider's until its completion has come. */
typedef struct pk_op {
    _Alignas(64) unsigned char context[64];
    pk_op_kind kind;
    pk_peer *peer;
    pk_ticket *ticket; /* of a write */
    uint64_t length;
    uint32_t rail;
    bool completed;
    struct pk_op *next;
    struct pk_op *previous;
} pk_op;

/* Ours for one peer on one rail. */
typedef struct {
    struct fid_ep *ep;
    struct fid_av *av;
    fi_addr_t destination;
    uint32_t outstanding;
    int64_t retry_at; /* nanoseconds; the provider put us off until then */
    int64_t retry_delay;
    /* Its door, for what carries no data: the other side writes to the first line, we send the second, and read into the
     * third. */
    struct fid_mr *door_mr;
    unsigned char door[3][PK_LINE];
    uint8_t address[PK_ADDRESS_ROOM]; /* our own */
    uint64_t their_door; /* remote address and key of the other side's */
    uint64_t their_key;
    bool warming;        /* the way there is being made ready */
    bool follows;        /* the other side goes first */
    bool warm_up_posted;
    int64_t warm_until; /* when to leave that to the first write */
} pk_endpoint;

struct pk_peer {
    uint64_t id;
    bool fencing;       /* [lock] */
    bool connecting;    /* [lock] */
    bool connected;     /* [lock] */
    uint32_t rails;     /* that both sides have; stays as it is once the peer is connected */
    pk_target *targets; /* [lock] */
    /* All below: [progress] */
    uint32_t turn; /* the rail to look at first */
    pk_op *ops;
    pk_ticket *first;  /* with writes left to post */
    pk_ticket *last;
    pk_ticket *draining;  /* all that will be posted is posted */
    pk_peer *next;        /* all peers */
    pk_peer *previous;
    pk_endpoint endpoints[]; /* one per rail */
};

int pk_rail_open(pk_rail *rail, const pk_library *library, const pk_options *options, struct fi_info *info,
                 pk_failure *failure);
void pk_rail_close(pk_rail *rail, const pk_library *library);
/* For memory whose key is ours to choose: whoever has it may write there. */
uint64_t pk_secret_key(const pk_rail *rail);

/* ---- endpoint.c: a peer's endpoints ---- */

int pk_endpoints_open(pk_core *core, pk_peer *peer, pk_contact *contacts, pk_failure *failure);
int pk_endpoints_connect(pk_core *core, pk_peer *peer, const pk_contact *contacts, pk_failure *failure);
/* May be called again after a failure. */
int pk_endpoints_close(pk_core *core, pk_peer *peer, pk_failure *failure);

/* ---- memory.c ---- */

int pk_memory_register(pk_core *core, pk_memory *memory, pk_failure *failure);
int pk_memory_close(pk_core *core, pk_memory *memory, pk_failure *failure);
void pk_memory_free(pk_memory *memory);
uint64_t pk_description_size(const pk_core *core, const pk_memory *memory);
/* Needs the lock. */
void pk_targets_free(pk_core *core, pk_peer *peer);

#endif
