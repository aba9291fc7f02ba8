/* What the core's files share.
 *
 * Threads and ownership. Each core has one progress thread. From the end of pk_open to its own end that thread alone
 * calls libfabric, and alone touches rails, endpoints, posted writes and tickets: struct members marked [progress].
 * Every other thread only reads or changes what is marked [lock], and holds core->lock while it does; the lock is never
 * held during a call of libfabric. Requests travel in one queue, so a fence is behind the writes that were asked for
 * before it; a peer that is being fenced takes no new writes, so nothing behind a fence names that peer. A synchronous
 * request lies on its caller's stack until it is answered; a write request is its ticket, which belongs to the progress
 * thread from the moment it is queued and is freed when its event is. Members without a mark never change after pk_open.
 * Room for a ticket's or a goal's event is made when it is asked for, so that an event can always be delivered. There
 * are no globals.
 */
#ifndef PK_CORE_H
#define PK_CORE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "api.h"
#include "ofi.h"

#define PK_SLOTS (1u << 20)
#define PK_EPOCHS (1u << 12)
#define PK_EPOCH_BITS 12
#define PK_COMPLETIONS 8192 /* room in a completion queue */
#define PK_MOST_PARTS 1024  /* of one memory */

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
    uint32_t depth;
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
    unsigned shift;
    uint64_t count; /* of parts */
    pk_part *parts; /* rail by rail */
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

/* One write under way. The first 64 bytes are the provider's until its completion has come. */
typedef struct pk_op {
    _Alignas(64) unsigned char context[64];
    pk_ticket *ticket;  /* NULL: not under way */
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

/* Needs the lock. NULL, with the failure told, unless the peer may be used. */
pk_peer *pk_usable_peer(pk_core *core, uint64_t id, pk_failure *failure);

/* ---- requests ---- */

typedef enum {
    PK_DO_REGISTER,
    PK_DO_DEREGISTER,
    PK_DO_OPEN_PEER,
    PK_DO_CONNECT,
    PK_DO_FENCE,
    PK_DO_WRITE,
    PK_DO_CANCEL
} pk_request_kind;

typedef struct pk_request {
    pk_request_kind kind;
    struct pk_request *next;
    bool answered;  /* [lock] synchronous ones */
    int code;
    pk_failure *failure;
    pk_peer *peer;
    pk_memory *memory;
    uint64_t id;  /* of the peer, the memory or the ticket */
    pk_contact *contacts;             /* to store */
    const pk_contact *their_contacts; /* as many as both sides have rails */
    uint64_t size;                    /* of a description */
} pk_request;

/* ---- ticket.c ---- */

typedef struct {
    pk_memory *memory; /* NULL: not counted as a user of it */
    const pk_target *target;
    uint64_t local;  /* offset in memory */
    uint64_t remote; /* offset in target */
} pk_mapped_span;

typedef struct {
    pk_mapped_span *spans;
    uint64_t span_count;
    pk_run *runs;
    uint64_t run_count;
    uint64_t local_end;   /* furthest offset that a run reaches */
    uint64_t remote_end;
} pk_mapped_product;

struct pk_ticket {
    pk_request request; /* first, so that a write request is its ticket */
    uint64_t id;
    pk_peer *peer;
    uint32_t immediate;
    uint32_t ready_value;
    const uint32_t *ready;  /* NULL: post at once */
    uint64_t limit;         /* bytes of a write */
    uint64_t writes;
    uint64_t bytes;
    uint64_t posted;
    uint64_t outstanding;
    uint64_t written;
    uint64_t in_doubt;
    bool stopped;  /* post no more of it */
    pk_mapped_product *products;
    uint64_t product_count;
    /* The next write to post. */
    uint64_t product;
    uint64_t span;
    uint64_t run;
    uint64_t done;  /* bytes of that run */
    pk_ticket *next;
    pk_ticket *previous;
    char detail[192];
};

/* The next write of a ticket. It can go over any rail. */
typedef struct {
    const pk_memory *memory;
    const pk_target *target;
    uint64_t local; /* offset in memory */
    uint64_t remote;
    uint64_t length;
} pk_piece;

/* ---- the core ---- */

typedef struct {
    uint32_t expected;  /* epoch + 1, or 0 */
    uint32_t count;
    uint32_t goal;
    bool armed;  /* an event is owed when count reaches goal */
} pk_slot;

struct pk_core {
    pk_library library;
    pk_facts facts;
    pk_rail rails[PK_MOST_RAILS];
    uint32_t rail_count;
    uint64_t stripe;
    uint64_t most_registered;
    pthread_t thread;
    int wake_fd;  /* eventfd */

    pthread_mutex_t lock;
    pthread_cond_t answered;
    pthread_cond_t happened;

    /* [lock] */
    pk_request *requests;
    pk_request *last_request;
    bool sleeping;
    bool closing;
    bool closed;
    pk_table peers;
    pk_table memories;
    pk_table targets;
    uint64_t next_ticket;
    pk_slot *slots;
    uint32_t expected;
    pk_event *events;  /* a ring */
    uint64_t events_size;
    uint64_t events_first;
    uint64_t events_count;
    uint64_t events_owed;
    bool woken;
    pk_counters counters;

    /* [progress] */
    pk_peer *first_peer;
    uint32_t depth; /* writes under way per endpoint: its share of the completion queue, within the rails' depth */
    pk_op *free_ops;
    struct pk_op_chunk *chunks;
    uint64_t unposted;     /* tickets with writes left to post */
    uint64_t outstanding;  /* writes */
    uint64_t retries;
    bool expecting;        /* as of the last look under the lock */
    uint32_t quiet_rounds;
    int64_t nap;  /* nanoseconds */
};

/* ticket.c; pk_ticket_map and pk_ticket_free need the lock */
pk_ticket *pk_ticket_new(const pk_product *products, uint64_t count, pk_failure *failure);
int pk_ticket_map(pk_core *core, pk_ticket *ticket, const pk_product *products, pk_failure *failure);
void pk_ticket_free(pk_ticket *ticket);
bool pk_ticket_ready(const pk_ticket *ticket);
pk_piece pk_ticket_piece(const pk_ticket *ticket);
void pk_ticket_advance(pk_ticket *ticket, uint64_t length);
/* Put it among its peer's tickets, take it out. */
void pk_ticket_start(pk_core *core, pk_ticket *ticket);
/* Post no more of it. text may be NULL; the first one given is kept. */
void pk_ticket_stop(pk_core *core, pk_ticket *ticket, const char *text);
/* Tell its end and free it if nothing of it is left to post or under way. */
void pk_ticket_settle(pk_core *core, pk_ticket *ticket);
void pk_ticket_rotate(pk_ticket *ticket);

/* post.c */
uint64_t pk_post(pk_core *core);

/* op.c */
pk_op *pk_op_take(pk_core *core, pk_ticket *ticket, uint32_t rail, uint64_t length);
void pk_op_release(pk_core *core, pk_op *op);
bool pk_op_known(const pk_core *core, const pk_op *op);
void pk_ops_free(pk_core *core);

/* completion.c */
uint64_t pk_complete(pk_core *core, int batches);
int pk_fence_now(pk_core *core, pk_peer *peer, pk_failure *failure);

/* slots.c; these need the lock */
bool pk_events_owe(pk_core *core);
void pk_events_push(pk_core *core, const pk_event *event);
void pk_slot_count(pk_core *core, uint32_t immediate);

/* progress.c */
void *pk_progress(void *core);
/* Needs the lock: have the progress thread look at once. */
void pk_kick(pk_core *core);
int64_t pk_now(void);

/* request.c */
void pk_do(pk_core *core, pk_request *request);
void pk_answer(pk_core *core, pk_request *request, int code);

#endif
