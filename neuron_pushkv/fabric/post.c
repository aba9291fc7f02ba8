/* Posting: within each endpoint's depth, a few writes per peer and turn, tickets of a peer in turn, over all its rails. */

#include "core.h"

#include <stdio.h>

#define TURN 16
#define FIRST_DELAY 20000    /* nanoseconds */
#define LONGEST_DELAY 5000000

/* POSTED one; PUT_OFF by the provider, on one rail; FULL, all rails; REFUSED for good. */
typedef enum { POSTED, PUT_OFF, FULL, REFUSED } outcome;

/* The rail whose queue has most room, and of equals the next one in turn; -1 if none has any. closed: as bits. */
static int roomiest(const pk_core *core, const pk_peer *peer, uint64_t closed, int64_t now)
{
    uint32_t least = core->depth;
    int best = -1;

    for (uint32_t i = 0; i < peer->rails; i++) {
        uint32_t rail = (peer->turn + i) % peer->rails;
        const pk_endpoint *endpoint = &peer->endpoints[rail];
        if (endpoint->outstanding < least && !(closed >> rail & 1) && endpoint->retry_at <= now && endpoint->ep &&
            !endpoint->warming) {
            least = endpoint->outstanding;
            best = (int)rail;
        }
    }
    return best;
}

void pk_put_off(pk_core *core, pk_endpoint *endpoint, int64_t now)
{
    core->retries++;
    /* With writes under way their completions make room. With none it is the way there that isn't ready. */
    if (!endpoint->outstanding) {
        int64_t delay = endpoint->retry_delay ? 2 * endpoint->retry_delay : FIRST_DELAY;
        endpoint->retry_delay = delay < LONGEST_DELAY ? delay : LONGEST_DELAY;
        endpoint->retry_at = now + endpoint->retry_delay;
    }
}

static ssize_t post_piece(const pk_ticket *ticket, const pk_piece *piece, uint32_t rail, pk_op *op)
{
    const pk_memory *memory = piece->memory;
    const pk_target *target = piece->target;
    pk_endpoint *endpoint = &ticket->peer->endpoints[rail];
    uint64_t local_part = piece->local >> memory->shift, remote_part = piece->remote >> target->shift;
    uint64_t remote =
        target->virtual_base ? target->base + piece->remote : piece->remote - (remote_part << target->shift);

    return endpoint->ep->rma->writedata(
        endpoint->ep, (const void *)(uintptr_t)(memory->address + piece->local), piece->length,
        memory->parts[rail * memory->count + local_part].desc, ticket->immediate, endpoint->destination, remote,
        target->keys[rail * target->count + remote_part], op->context);
}

static outcome post_one(pk_core *core, pk_ticket *ticket, uint64_t *closed, int64_t now)
{
    pk_peer *peer = ticket->peer;
    int rail = roomiest(core, peer, *closed, now);

    if (rail < 0)
        return FULL;
    pk_endpoint *endpoint = &peer->endpoints[rail];
    pk_piece piece = pk_ticket_piece(ticket);
    pk_op *op = pk_op_take(core, PK_OP_WRITE, peer, ticket, (uint32_t)rail, piece.length);
    if (!op) {
        pk_ticket_stop(core, ticket, "out of memory for another write");
        return REFUSED;
    }
    ssize_t error = post_piece(ticket, &piece, (uint32_t)rail, op);
    if (!error) {
        endpoint->retry_delay = endpoint->retry_at = 0;
        peer->turn = ((uint32_t)rail + 1) % peer->rails;
        pk_ticket_advance(ticket, piece.length);
        return POSTED;
    }
    pk_op_release(core, op);
    if (error == -FI_EAGAIN) {
        pk_put_off(core, endpoint, now);
        *closed |= 1ULL << rail;
        return PUT_OFF;
    }
    char text[192];
    snprintf(text, sizeof text, "the write was refused: %s (%ld)", core->library.strerror((int)-error), (long)error);
    pk_ticket_stop(core, ticket, text);
    return REFUSED;
}

/* Up to a turn's worth of writes per rail to one peer. */
static uint64_t post_peer(pk_core *core, pk_peer *peer, int64_t now)
{
    uint64_t posted = 0, closed = 0;
    uint64_t most = TURN * (uint64_t)peer->rails;
    pk_ticket *ticket = peer->first;
    const pk_ticket *end = peer->last;
    outcome result = POSTED;

    while (ticket && posted < most && result != FULL) {
        pk_ticket *next = ticket == end ? NULL : ticket->next;
        if (!pk_ticket_ready(ticket)) {
            ticket = next;
            continue;
        }
        result = POSTED;
        while ((result == POSTED || result == PUT_OFF) && posted < most && ticket->posted < ticket->writes) {
            result = post_one(core, ticket, &closed, now);
            posted += result == POSTED;
        }
        if (result == REFUSED || ticket->posted == ticket->writes) {
            pk_ticket_stop(core, ticket, NULL);
            pk_ticket_settle(core, ticket);
        } else {
            pk_ticket_rotate(ticket);
        }
        ticket = next;
    }
    return posted;
}

uint64_t pk_post(pk_core *core)
{
    uint64_t posted = 0;
    int64_t now = pk_now();

    for (pk_peer *peer = core->first_peer; peer && core->unposted; peer = peer->next)
        if (peer->first)
            posted += post_peer(core, peer, now);
    return posted;
}
