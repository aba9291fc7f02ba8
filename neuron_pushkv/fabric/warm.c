/* Making the way to a new peer ready before it is needed: connections, handshakes, mappings of shared memory.
 *
 * As soon as a peer is connected each of its endpoints writes 8 bytes into the other side's door, without an immediate:
 * so nothing of it shows in the other side's queue and counts. Until that has succeeded no other write uses the endpoint.
 *
 * One side goes first, and the other when it finds its door written to. For if both connect at the same time, tcp fails
 * what the one of them has posted, and can crash (libfabric 2.5). A warm-up that fails is tried again, since the other
 * side may not know us yet. After a while it is left to the first write to find out what is wrong.
 */

#include "core.h"

#include <string.h>

#define LENGTH 8
#define PATIENCE 2000000000LL /* nanoseconds */

void pk_warm_up_begin(pk_core *core, pk_endpoint *endpoint, const pk_contact *contact)
{
    endpoint->their_door = contact->door;
    endpoint->their_key = contact->key;
    endpoint->follows = memcmp(contact->address, endpoint->address, sizeof contact->address) < 0;
    endpoint->warm_until = pk_now() + PATIENCE;
    endpoint->warm_up_posted = false;
    core->warming += !endpoint->warming;
    endpoint->warming = true;
}

void pk_warm_up_end(pk_core *core, pk_endpoint *endpoint)
{
    core->warming -= endpoint->warming;
    endpoint->warming = false;
}

void pk_warm_up_done(pk_core *core, pk_endpoint *endpoint, bool good)
{
    endpoint->warm_up_posted = false;
    if (good) {
        pthread_mutex_lock(&core->lock);
        core->counters.warm_ups++;
        pthread_mutex_unlock(&core->lock);
        pk_warm_up_end(core, endpoint);
    } else {
        pk_put_off(core, endpoint, pk_now());
    }
}

static bool post(pk_core *core, pk_peer *peer, uint32_t index, int64_t now)
{
    pk_endpoint *endpoint = &peer->endpoints[index];
    pk_op *op = pk_op_take(core, PK_OP_WARM_UP, peer, NULL, index, LENGTH);

    if (!op)
        return false;
    ssize_t error = endpoint->ep->rma->write(endpoint->ep, endpoint->door[1], LENGTH, endpoint->door_mr->mem_desc,
                                             endpoint->destination, endpoint->their_door, endpoint->their_key,
                                             op->context);
    if (error) {
        pk_op_release(core, op);
        pk_put_off(core, endpoint, now);
    } else {
        endpoint->warm_up_posted = true;
        endpoint->retry_delay = endpoint->retry_at = 0;
    }
    return !error;
}

/* Whether it is our turn. */
static bool may_go(const pk_endpoint *endpoint)
{
    return !endpoint->follows || __atomic_load_n(&endpoint->door[0][0], __ATOMIC_ACQUIRE);
}

uint64_t pk_warm_up(pk_core *core)
{
    int64_t now = pk_now();
    uint64_t posted = 0;

    for (pk_peer *peer = core->first_peer; peer && core->warming; peer = peer->next)
        for (uint32_t i = 0; i < peer->rails; i++) {
            pk_endpoint *endpoint = &peer->endpoints[i];
            if (!endpoint->warming)
                continue;
            if (now > endpoint->warm_until || !endpoint->ep)
                pk_warm_up_end(core, endpoint);
            else if (!endpoint->warm_up_posted && endpoint->retry_at <= now && may_go(endpoint))
                posted += post(core, peer, i, now);
        }
    return posted;
}
