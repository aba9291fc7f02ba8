/* The progress thread: requests, posting, completions, and how long to look away when there is nothing. */

#include "core.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* Rounds without progress that are worth a look at once; from the first yield on others may run. */
#define SPINS 48
#define SPINS_BEFORE_YIELD 16

#define MICROSECOND 1000LL
#define SHORTEST_NAP (20 * MICROSECOND)
#define NAP_WITH_WRITES_TO_POST (200 * MICROSECOND)  /* a ready word or room in a queue, which nothing announces */
#define NAP_WITH_WRITES_UNDER_WAY (200 * MICROSECOND)
#define NAP_WHILE_EXPECTING (1000 * MICROSECOND)
#define NAP_WHEN_IDLE (5000 * MICROSECOND)
/* Where the provider has a descriptor to wait on it is that which ends the nap. */
#define NAP_WHEN_ANNOUNCED (2000 * MICROSECOND)
#define NAP_WHEN_IDLE_AND_ANNOUNCED (50000 * MICROSECOND)

int64_t pk_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void pk_kick(pk_core *core)
{
    uint64_t one = 1;

    if (!core->sleeping)
        return;
    core->sleeping = false;
    core->counters.wakeups++;
    if (write(core->wake_fd, &one, sizeof one) < 0) {
        /* Only when its counter is full, and then it is readable already. */
    }
}

static int64_t longest_nap(const pk_core *core)
{
    bool announced = core->facts.waits;

    if (core->unposted || core->flushed || core->warming)
        return NAP_WITH_WRITES_TO_POST;
    if (core->outstanding)
        return announced ? NAP_WHEN_ANNOUNCED : NAP_WITH_WRITES_UNDER_WAY;
    if (core->expecting)
        return announced ? NAP_WHEN_ANNOUNCED : NAP_WHILE_EXPECTING;
    return announced ? NAP_WHEN_IDLE_AND_ANNOUNCED : NAP_WHEN_IDLE;
}

static void nap(pk_core *core)
{
    bool announced = core->facts.waits;
    bool busy = core->unposted || core->outstanding || core->expecting || core->flushed || core->warming;
    struct pollfd fds[1 + PK_MOST_RAILS] = {{core->wake_fd, POLLIN, 0}};
    int64_t longest = longest_nap(core);
    struct timespec time;
    uint64_t count;

    if (busy && core->quiet_rounds++ < SPINS) {
        if (core->quiet_rounds > SPINS_BEFORE_YIELD)
            sched_yield();
        return;
    }
    if (announced && longest > NAP_WITH_WRITES_TO_POST)
        core->nap = longest;
    else
        core->nap = core->nap ? 2 * core->nap : SHORTEST_NAP;
    if (core->nap > longest)
        core->nap = longest;
    for (uint32_t i = 0; announced && i < core->rail_count; i++) {
        const pk_rail *rail = &core->rails[i];
        struct fid *fid = &rail->cq->fid;
        if (rail->fabric->ops->trywait(rail->fabric, &fid, 1) == -FI_EAGAIN)
            return; /* something has come meanwhile */
        fds[1 + i] = (struct pollfd){rail->wait_fd, POLLIN, 0};
    }
    pthread_mutex_lock(&core->lock);
    bool sleep = !core->requests && !core->closing && core->expecting == (core->expected > 0) &&
                 core->flushed == core->held_count;
    core->sleeping = sleep;
    core->counters.sleeps += sleep;
    pthread_mutex_unlock(&core->lock);
    if (!sleep)
        return;
    time.tv_sec = core->nap / 1000000000;
    time.tv_nsec = core->nap % 1000000000;
    int ready = ppoll(fds, announced ? 1 + core->rail_count : 1, &time, NULL);
    pthread_mutex_lock(&core->lock);
    core->sleeping = false;
    pthread_mutex_unlock(&core->lock);
    if (ready > 0 && (fds[0].revents & POLLIN) && read(core->wake_fd, &count, sizeof count) < 0) {
        /* Nobody else reads it; if it were empty all the same, that is what is wanted. */
    }
}

/* Everything is ended: what was asked for, what is under way, what is open. */
static void shut_down(pk_core *core)
{
    pk_failure failure;
    bool clean = true;

    /* From here on no id names anything, so nobody who was waiting for an answer touches what is freed below. */
    pthread_mutex_lock(&core->lock);
    pk_table peers = core->peers, memories = core->memories;
    free(core->targets.entries);
    core->peers = core->memories = core->targets = (pk_table){0};
    pthread_mutex_unlock(&core->lock);
    free(peers.entries);
    while (core->first_peer) {
        pk_peer *peer = core->first_peer;
        core->first_peer = peer->next;
        if (pk_fence_now(core, peer, &failure)) {
            clean = false;
        } else {
            pthread_mutex_lock(&core->lock);
            pk_targets_free(core, peer);
            pthread_mutex_unlock(&core->lock);
            free(peer);
        }
    }
    for (uint32_t i = 0; clean && i < memories.size; i++) {
        pk_memory *memory = memories.entries[i].item;
        if (!memory)
            continue;
        pk_memory_close(core, memory, &failure);
        pk_memory_free(memory);
    }
    free(memories.entries);
    if (!clean)
        return; /* an endpoint that won't close may still use all the rest: better leaked than freed under it */
    for (uint32_t i = 0; i < core->rail_count; i++)
        pk_rail_close(&core->rails[i], &core->library);
    pk_ops_free(core);
}

void *pk_progress(void *argument)
{
    pk_core *core = argument;
    sigset_t signals;

    /* Those that are sent are for Python's threads; those that we cause ourselves are for us. */
    sigfillset(&signals);
    sigdelset(&signals, SIGSEGV);
    sigdelset(&signals, SIGBUS);
    sigdelset(&signals, SIGFPE);
    sigdelset(&signals, SIGILL);
    sigdelset(&signals, SIGABRT);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    prctl(PR_SET_NAME, "pushkv-fabric", 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
    for (;;) {
        pthread_mutex_lock(&core->lock);
        pk_request *requests = core->requests;
        bool closing = core->closing;
        core->requests = core->last_request = NULL;
        core->expecting = core->expected > 0;
        core->counters.outstanding = core->outstanding;
        core->counters.retries = core->retries;
        pthread_mutex_unlock(&core->lock);

        bool asked = requests != NULL;
        while (requests) {
            pk_request *request = requests;
            requests = request->next;
            pk_do(core, request);
        }
        if (closing)
            break;
        uint64_t moved = core->unposted ? pk_post(core) : 0;
        moved += pk_complete(core, 8);
        if (core->warming)
            moved += pk_warm_up(core);
        if (core->flush)
            moved += pk_flush(core);
        if (moved || asked) {
            core->quiet_rounds = 0;
            core->nap = 0;
        } else {
            nap(core);
        }
    }
    shut_down(core);
    return NULL;
}
