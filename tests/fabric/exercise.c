/* Drives the native core from C, so that a sanitizer can watch: exercise LIBRARY PROVIDER
 *
 * Two cores exchange data over several rails, in stripes and parts, count, flush, cancel, fence with writes under way,
 * and close with writes under way, from several threads. shm can't connect endpoints of one process, so there the second core is a forked child's, which writes too.
 * Exits 0 if all went as it must.
 */

#include "core.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE (4u << 20)
#define PIECE 4096u
#define ROUNDS 8
#define THREADS 3
#define RAILS 3

#define CHECK(condition)                                                                      \
    do {                                                                                      \
        if (!(condition)) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, failure.text); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

/* What a peer must know of a side's memory. */
typedef struct {
    uint64_t size;
    uint8_t bytes[4096];
} description;

typedef struct {
    pk_core *core;
    unsigned char *data;
    uint64_t memory;
    description own;
    uint64_t peer, target;
    pk_contact contacts[RAILS];
} side;

/* Where two processes meet: what each must know of the other. */
typedef struct {
    description memory;
    pk_contact contacts[RAILS];
    int stage;
} meeting;

static pk_failure failure;

static void open_side(side *s, const char *library, const char *provider, bool flush)
{
    pk_options options = {.library = library, .provider = provider, .host = strcmp(provider, "tcp") ? NULL : "127.0.0.1",
                          .least_version = FI_VERSION(1, 17), .api_version = FI_VERSION(1, 22), .tx_depth = 64, .rails = RAILS,
                          .stripe = 1500, .most_registered = SIZE / 4, .cpu = -1, .flush = flush};
    memset(s, 0, sizeof *s);
    CHECK(pk_open(&options, &s->core, &failure) == PK_OK);
    s->data = malloc(SIZE);
    memset(s->data, 7, SIZE);
    CHECK(pk_register(s->core, (uintptr_t)s->data, SIZE, 0, -1, 20, NULL, &s->memory, &s->own.size, &failure) == PK_OK);
    CHECK(s->own.size <= sizeof s->own.bytes);
    CHECK(pk_describe(s->core, s->memory, s->own.bytes, &failure) == PK_OK);
}

static void open_peer(side *s)
{
    memset(s->contacts, 0, sizeof s->contacts);
    CHECK(pk_open_peer(s->core, &s->peer, s->contacts, &failure) == PK_OK);
}

static void connect_to(side *s, const pk_contact *contacts, const description *memory)
{
    CHECK(!pk_connect(s->core, s->peer, contacts, RAILS, &failure));
    CHECK(!pk_attach(s->core, s->peer, memory->bytes, memory->size, &s->target, &failure));
}

static void close_side(side *s)
{
    pk_close(s->core);
    pk_close(s->core);
    pk_event event;
    CHECK(pk_poll(s->core, &event, 1, 0) == -1);
    pk_free(s->core);
    free(s->data);
}

static int write_to(const side *s, uint64_t runs, uint32_t immediate, const uint32_t *ready, pk_receipt *receipt,
                    pk_failure *why)
{
    pk_span spans[2] = {{s->memory, (uintptr_t)s->data, s->target, 0},
                        {s->memory, (uintptr_t)s->data + SIZE / 2, s->target, SIZE / 2}};
    pk_run *run = calloc(runs, sizeof *run);
    for (uint64_t i = 0; i < runs; i++) {
        uint64_t place = i % (SIZE / 2 / PIECE) * PIECE;
        run[i] = (pk_run){place, SIZE / 2 - PIECE - place, PIECE - i % 7};
    }
    pk_product product = {spans, 2, run, runs};
    int code = pk_write(s->core, s->peer, &product, 1, immediate, (uintptr_t)ready, 1, receipt, why);
    free(run); /* the core has its own copy */
    return code;
}

/* Poll until that many tickets have ended; how many of them were written. */
static int ended(pk_core *core, int wanted)
{
    pk_event events[4];
    int written = 0;

    while (wanted > 0) {
        int count = pk_poll(core, events, 4, 15000000000);
        CHECK(count > 0);
        for (int i = 0; i < count; i++) {
            if (events[i].kind == PK_ARRIVED)
                continue;
            wanted--;
            written += events[i].kind == PK_WRITTEN;
        }
    }
    return written;
}

typedef struct {
    side *s;
    uint32_t slot;
} job;

static void *busy(void *argument)
{
    job *j = argument;
    pk_failure why;
    pk_receipt receipt;
    pk_counters counters;

    for (int i = 0; i < ROUNDS; i++) {
        if (write_to(j->s, 20, j->slot << PK_EPOCH_BITS, NULL, &receipt, &why))
            abort();
        pk_cancel(j->s->core, receipt.ticket + 100000, &why);
        pk_expect(j->s->core, j->slot, 1, &why);
        pk_goal(j->s->core, j->slot, 1, 5, &why);
        pk_count(j->s->core, j->slot, 1);
        pk_get_counters(j->s->core, &counters);
        pk_forget(j->s->core, j->slot);
    }
    return NULL;
}

/* What one side does to the other, given a fresh connected pair of endpoints each time by renew. */
static void attack(side *s, void (*renew)(side *, void *), void *how)
{
    pk_receipt receipt;
    pthread_t threads[THREADS];
    job jobs[THREADS];
    uint32_t word = 0;

    renew(s, how);
    for (uint32_t i = 0; i < THREADS; i++) {
        jobs[i] = (job){s, i + 1};
        pthread_create(&threads[i], NULL, busy, &jobs[i]);
    }
    CHECK(ended(s->core, THREADS * ROUNDS) == THREADS * ROUNDS);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);

    /* Held back, then released; held back, then cancelled. */
    CHECK(!write_to(s, 10, 0, &word, &receipt, &failure));
    CHECK(pk_poll(s->core, &(pk_event){0}, 1, 2000000) == 0);
    __atomic_store_n(&word, 1, __ATOMIC_RELEASE);
    CHECK(ended(s->core, 1) == 1);
    __atomic_store_n(&word, 0, __ATOMIC_RELEASE);
    CHECK(!write_to(s, 10, 0, &word, &receipt, &failure));
    CHECK(!pk_cancel(s->core, receipt.ticket, &failure));
    CHECK(ended(s->core, 1) == 0);

    /* Cut off wherever it is. */
    for (int i = 0; i < ROUNDS; i++) {
        for (int j = 0; j < 3; j++)
            CHECK(!write_to(s, 2000, 0, NULL, &receipt, &failure));
        if (i % 2)
            CHECK(!pk_cancel(s->core, receipt.ticket, &failure));
        usleep((useconds_t)(i * 300));
        CHECK(!pk_fence(s->core, s->peer, &failure));
        CHECK(ended(s->core, 3) < 4);
        CHECK(write_to(s, 1, 0, NULL, &receipt, &failure) == PK_UNKNOWN_PEER);
        CHECK(!pk_fence(s->core, s->peer, &failure));
        renew(s, how);
    }
    CHECK(pk_deregister(s->core, s->memory + 1, &failure) == PK_UNKNOWN_MEMORY);

    /* In stripes, or pieces of at most max_message bytes, each counted. */
    CHECK(!write_to(s, 7, 0, NULL, &receipt, &failure));
    CHECK(receipt.writes == 2 * 7 * 3);
    s->core->facts.max_message = 1000;
    CHECK(!write_to(s, 7, 0, NULL, &receipt, &failure));
    CHECK(receipt.writes == 2 * 7 * 5);
    CHECK(ended(s->core, 2) == 2);

    /* The end comes with writes under way. */
    CHECK(!write_to(s, 5000, 0, NULL, &receipt, &failure));
}

static void renew_within(side *s, void *other)
{
    side *o = other;

    if (o->peer)
        CHECK(!pk_fence(o->core, o->peer, &failure));
    open_peer(s);
    open_peer(o);
    connect_to(s, o->contacts, &o->own);
    connect_to(o, s->contacts, &s->own);
}

static void within_one_process(const char *library, const char *provider)
{
    side a, b;

    open_side(&a, library, provider, false);
    open_side(&b, library, provider, true);
    CHECK(!pk_expect(b.core, 0, 0, &failure));
    CHECK(!pk_goal(b.core, 0, 0, 20, &failure));
    attack(&a, renew_within, &b);
    CHECK(pk_count(b.core, 0, 0) >= 20);
    pk_event event;
    pk_counters counters;
    CHECK(pk_poll(b.core, &event, 1, 5000000000) == 1 && event.kind == PK_ARRIVED);
    pk_get_counters(b.core, &counters);
    CHECK(counters.flushes);
    close_side(&a);
    close_side(&b);
}

/* Stages: 0 the attacker asks for an endpoint, with its address; 1 the target has answered; 2 the end. */
static void await(volatile int *stage, int value)
{
    for (int i = 0; i < 100000 && __atomic_load_n(stage, __ATOMIC_ACQUIRE) != value; i++)
        usleep(100);
    CHECK(*stage == value);
}

static void renew_across(side *s, void *shared)
{
    meeting *both = shared;

    open_peer(s);
    await(&both[0].stage, 1);
    both[0].memory = s->own;
    memcpy(both[0].contacts, s->contacts, sizeof s->contacts);
    __atomic_store_n(&both[0].stage, 0, __ATOMIC_RELEASE);
    await(&both[0].stage, 1);
    connect_to(s, both[1].contacts, &both[1].memory);
}

static void serve(const char *library, const char *provider, meeting *both)
{
    side b;

    open_side(&b, library, provider, false);
    CHECK(!pk_expect(b.core, 0, 0, &failure));
    both[1].memory = b.own;
    __atomic_store_n(&both[0].stage, 1, __ATOMIC_RELEASE);
    for (;;) {
        int stage = 1;
        while ((stage = __atomic_load_n(&both[0].stage, __ATOMIC_ACQUIRE)) == 1)
            usleep(100);
        if (stage == 2)
            break;
        if (b.peer)
            CHECK(!pk_fence(b.core, b.peer, &failure));
        open_peer(&b);
        connect_to(&b, both[0].contacts, &both[0].memory);
        memcpy(both[1].contacts, b.contacts, sizeof b.contacts);
        __atomic_store_n(&both[0].stage, 1, __ATOMIC_RELEASE);
    }
    CHECK(pk_count(b.core, 0, 0) >= 20);
    close_side(&b);
    exit(0);
}

static void across_processes(const char *library, const char *provider)
{
    meeting *both = mmap(NULL, 2 * sizeof *both, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    side a;
    int status;

    pid_t child = fork(); /* before anybody has opened anything */
    if (!child)
        serve(library, provider, both);
    open_side(&a, library, provider, false);
    await(&both[0].stage, 1);
    attack(&a, renew_across, both);
    close_side(&a);
    __atomic_store_n(&both[0].stage, 2, __ATOMIC_RELEASE);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
    munmap(both, 2 * sizeof *both);
}

static void *meddle(void *argument)
{
    side *s = argument;
    uint64_t peer, memory, size;
    pk_contact contacts[RAILS];
    unsigned char room[64];
    pk_failure why = {0};
    pk_event event;

    for (;;) {
        if (pk_open_peer(s->core, &peer, contacts, &why) || pk_fence(s->core, peer, &why) ||
            pk_register(s->core, (uintptr_t)room, sizeof room, 0, -1, PK_WHOLE, NULL, &memory, &size, &why) ||
            pk_deregister(s->core, memory, &why) || pk_poll(s->core, &event, 1, 0) < 0)
            break;
    }
    return NULL;
}

static void close_under_way(const char *library, const char *provider)
{
    pthread_t threads[THREADS];
    side s;

    open_side(&s, library, provider, strcmp(provider, "shm"));
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, meddle, &s);
    usleep(30000);
    pk_close(s.core);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    close_side(&s);
}

int main(int count, char **arguments)
{
    pk_core *core;
    pk_options nothing = {.library = "/nowhere/libfabric.so.1", .provider = "tcp"};

    if (count != 3)
        return 2;
    CHECK(pk_open(&nothing, &core, &failure) == PK_NO_LIBRARY);
    if (strcmp(arguments[2], "shm"))
        within_one_process(arguments[1], arguments[2]);
    else
        across_processes(arguments[1], arguments[2]);
    close_under_way(arguments[1], arguments[2]);
    puts("clean");
    return 0;
}
