/* Posting: within each endpoint's depth, a few writes per peer and turn, tickets of a peer in turn. */

#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TURN 16
#define OPS_PER_CHUNK 256
#define FIRST_DELAY 20000    /* nanoseconds */
#define LONGEST_DELAY 5000000

typedef struct pk_op_chunk {
    struct pk_op_chunk *next;
    pk_op *ops;
} pk_op_chunk;

static bool grow(pk_core *core)
{
    pk_op_chunk *chunk = malloc(sizeof *chunk);
    pk_op *ops = aligned_alloc(64, OPS_PER_CHUNK * sizeof *ops);

    if (!chunk || !ops) {
        free(chunk);
        free(ops);
        return false;
    }
    memset(ops, 0, OPS_PER_CHUNK * sizeof *ops);
    for (int i = 0; i < OPS_PER_CHUNK; i++) {
        ops[i].next = core->free_ops;
        core->free_ops = &ops[i];
    }
    *chunk = (pk_op_chunk){core->chunks, ops};
    core->chunks = chunk;
    return true;
}

pk_op *pk_op_take(pk_core *core, pk_ticket *ticket, uint64_t length)
{
    pk_peer *peer = ticket->peer;

    if (!core->free_ops && !grow(core))
        return NULL;
    pk_op *op = core->free_ops;
    core->free_ops = op->next;
    op->ticket = ticket;
    op->length = length;
    op->completed = false;
    op->previous = NULL;
    op->next = peer->ops;
    if (op->next)
        op->next->previous = op;
    peer->ops = op;
    peer->outstanding++;
    core->outstanding++;
    ticket->outstanding++;
    return op;
}

void pk_op_release(pk_core *core, pk_op *op)
{
    pk_ticket *ticket = op->ticket;
    pk_peer *peer = ticket->peer;

    if (op->previous)
        op->previous->next = op->next;
    else
        peer->ops = op->next;
    if (op->next)
        op->next->previous = op->previous;
    peer->outstanding--;
    core->outstanding--;
    ticket->outstanding--;
    op->ticket = NULL;
    op->next = core->free_ops;
    core->free_ops = op;
}

bool pk_op_known(const pk_core *core, const pk_op *op)
{
    for (const pk_op_chunk *chunk = core->chunks; chunk; chunk = chunk->next) {
        uintptr_t offset = (uintptr_t)op - (uintptr_t)chunk->ops;
        if (offset < OPS_PER_CHUNK * sizeof *op && offset % sizeof *op == 0)
            return op->ticket != NULL;
    }
    return false;
}

void pk_ops_free(pk_core *core)
{
    while (core->chunks) {
        pk_op_chunk *chunk = core->chunks;
        core->chunks = chunk->next;
        free(chunk->ops);
        free(chunk);
    }
    core->free_ops = NULL;
}

typedef enum { POSTED, PUT_OFF, REFUSED } outcome;

static outcome post_one(pk_core *core, pk_ticket *ticket)
{
    pk_peer *peer = ticket->peer;
    pk_piece piece = pk_ticket_piece(ticket, core->facts.max_message);
    pk_op *op = pk_op_take(core, ticket, piece.length);

    if (!op) {
        pk_ticket_stop(core, ticket, "out of memory for another write");
        return REFUSED;
    }
    ssize_t error = peer->ep->rma->writedata(peer->ep, piece.source, piece.length, piece.desc, ticket->immediate,
                                             peer->destination, piece.remote, piece.key, op->context);
    if (!error) {
        pk_ticket_advance(ticket, piece.length);
        return POSTED;
    }
    pk_op_release(core, op);
    if (error == -FI_EAGAIN) {
        core->retries++;
        return PUT_OFF;
    }
    char text[192];
    snprintf(text, sizeof text, "the write was refused: %s (%ld)", core->library.strerror((int)-error), (long)error);
    pk_ticket_stop(core, ticket, text);
    return REFUSED;
}

/* Up to a turn's worth of writes to one peer. */
static uint64_t post_peer(pk_core *core, pk_peer *peer, int64_t now)
{
    uint64_t posted = 0;
    pk_ticket *ticket = peer->first;
    const pk_ticket *end = peer->last;

    while (ticket && posted < TURN && peer->outstanding < core->depth) {
        pk_ticket *next = ticket == end ? NULL : ticket->next;
        if (!pk_ticket_ready(ticket)) {
            ticket = next;
            continue;
        }
        outcome result = POSTED;
        while (result == POSTED && posted < TURN && peer->outstanding < core->depth &&
               ticket->posted < ticket->writes) {
            result = post_one(core, ticket);
            posted += result == POSTED;
        }
        if (result == REFUSED || ticket->posted == ticket->writes) {
            pk_ticket_stop(core, ticket, NULL);
            pk_ticket_settle(core, ticket);
        } else {
            pk_ticket_rotate(ticket);
        }
        if (result == PUT_OFF) {
            /* With writes under way their completions make room. With none it is the way there that isn't ready. */
            if (!peer->outstanding) {
                int64_t delay = peer->retry_delay ? 2 * peer->retry_delay : FIRST_DELAY;
                peer->retry_delay = delay < LONGEST_DELAY ? delay : LONGEST_DELAY;
                peer->retry_at = now + peer->retry_delay;
            }
            break;
        }
        ticket = next;
    }
    if (posted)
        peer->retry_delay = peer->retry_at = 0;
    return posted;
}

uint64_t pk_post(pk_core *core)
{
    uint64_t posted = 0;
    int64_t now = pk_now();

    for (pk_peer *peer = core->first_peer; peer && core->unposted; peer = peer->next)
        if (peer->first && peer->retry_at <= now)
            posted += post_peer(core, peer, now);
    return posted;
}
