/* A stand-in for libfabric on a machine with EFA, within one process: what provider efa demands, refuses and promises.
 *
 * Cards carry writes between endpoints by copying, and show what they did out of order. Like efa it wants FI_HMEM for
 * device memory and FI_MR_HMEM with that, a local descriptor that covers what is sent, options before an endpoint is
 * enabled, a fresh descriptor (dmabuf) for each registration, and no FI_RMA_EVENT. Its fabric efa-direct uses all 64
 * bytes of an operation's context, and drops what comes from an endpoint that is not in the target's table. A device
 * may be slow to see what is written to it: then it sees that when it is read from over the same card.
 *
 * Set by the environment: FAKE_CARDS (names, by commas), FAKE_DEVICE (FI_HMEM_* that it was built for), FAKE_VERSION
 * (major.minor), FAKE_MOST (bytes of a registration), FAKE_REFUSE (any of: dmabuf, p2p, cuda, shm-unknown, regattr),
 * FAKE_LAZY (the device is slow to see), FAKE_LOG (a file to which registrations and options are written).
 */
#ifndef FAKE_H
#define FAKE_H

#define _GNU_SOURCE

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "ofi.h"

#define MOST 64     /* peers in a table */
#define QUEUE 16384 /* completions in a queue */
#define NUMBERS (1u << 20)
#define LONGEST (1ULL << 30)

typedef struct {
    void *context;
    uint64_t flags;
    uint64_t data;
    int error;
} entry;

typedef struct {
    struct fid_cq fid;
    entry entries[QUEUE];
    unsigned count;
} queue;

typedef struct {
    struct fid_domain fid;
    char card[64];
    bool direct;
    bool hmem;
} domain;

typedef struct {
    struct fid_mr fid;
    domain *of;
    uintptr_t start;
    size_t length;
    uint64_t access;
    int iface;
} region;

typedef struct {
    struct fid_av fid;
    uint64_t known[MOST];
    unsigned count;
} table;

typedef struct {
    struct fid_ep fid;
    domain *of;
    queue *cq;
    table *av;
    uint64_t number;
    bool enabled;
} endpoint;

/* One process, one network: held by whatever touches more than its own object. */
extern pthread_mutex_t lock;
extern region *regions[NUMBERS];
extern struct fi_ops plain_ops;
extern struct fi_ops_mr memory_ops;
extern struct fi_ops_domain domain_ops;

const char *setting(const char *name, const char *otherwise);
bool refuses(const char *what);
int device(void);
__attribute__((format(printf, 1, 2))) void say(const char *format, ...);
void push(queue *cq, void *context, uint64_t flags, uint64_t data, int error);
int cq_open(struct fid_domain *fid, void *attr, struct fid_cq **out, void *context);

#endif
