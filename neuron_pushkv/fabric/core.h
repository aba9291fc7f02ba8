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

#include "things.h"

#define PK_SLOTS (1u << 20)
#define PK_EPOCHS (1u << 12)
#define PK_EPOCH_BITS 12
#define PK_COMPLETIONS 8192 /* room in a completion queue */

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
    bool flush;
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
    pk_event *held; /* arrivals that are told after a flush, oldest first; room for as many as are owed */
    uint64_t held_count;
    bool woken;
    pk_counters counters;

    /* [progress] */
    pk_peer *first_peer;
    uint32_t depth; /* writes under way per endpoint: its share of the completion queue, within the rails' depth */
    pk_op *free_ops;
    struct pk_op_chunk *chunks;
    uint64_t unposted;     /* tickets with writes left to post */
    uint64_t outstanding;  /* writes, and reads of a flush */
    uint64_t warming;      /* endpoints */
    pk_peer *self;         /* endpoints to ourselves, for flushes; NULL without */
    uint64_t flushed;      /* arrivals held that the flush under way is for */
    uint64_t flushing;     /* reads under way */
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

/* The provider has put us off: when to try that endpoint again. */
void pk_put_off(pk_core *core, pk_endpoint *endpoint, int64_t now);

/* warm.c: making the way to a new peer ready */
uint64_t pk_warm_up(pk_core *core);
void pk_warm_up_begin(pk_core *core, pk_endpoint *endpoint, const pk_contact *contact);
void pk_warm_up_done(pk_core *core, pk_endpoint *endpoint, bool good);
void pk_warm_up_end(pk_core *core, pk_endpoint *endpoint);

/* flush.c: reading from a device, so that it sees what has arrived before anybody is told */
int pk_flush_open(pk_core *core, pk_failure *failure);
uint64_t pk_flush(pk_core *core);
void pk_flush_done(pk_core *core, pk_op *op, bool good);
/* Wait for the reads under way, since memory is about to go. */
void pk_flush_wait(pk_core *core);

/* op.c; ticket is NULL for what is no write */
pk_op *pk_op_take(pk_core *core, pk_op_kind kind, pk_peer *peer, pk_ticket *ticket, uint32_t rail, uint64_t length);
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
