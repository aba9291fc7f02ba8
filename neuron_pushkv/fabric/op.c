/* Operations under way: each has the room that the provider wants for its own, and is never moved. */

#include "core.h"

#include <stdlib.h>
#include <string.h>

#define OPS_PER_CHUNK 256

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

pk_op *pk_op_take(pk_core *core, pk_op_kind kind, pk_peer *peer, pk_ticket *ticket, uint32_t rail, uint64_t length)
{
    if (!core->free_ops && !grow(core))
        return NULL;
    pk_op *op = core->free_ops;
    core->free_ops = op->next;
    op->kind = kind;
    op->peer = peer;
    op->ticket = ticket;
    op->rail = rail;
    op->length = length;
    op->completed = false;
    op->previous = NULL;
    op->next = peer->ops;
    if (op->next)
        op->next->previous = op;
    peer->ops = op;
    peer->endpoints[rail].outstanding++;
    core->outstanding += kind != PK_OP_WARM_UP;
    if (ticket)
        ticket->outstanding++;
    return op;
}

void pk_op_release(pk_core *core, pk_op *op)
{
    pk_peer *peer = op->peer;

    if (op->previous)
        op->previous->next = op->next;
    else
        peer->ops = op->next;
    if (op->next)
        op->next->previous = op->previous;
    peer->endpoints[op->rail].outstanding--;
    core->outstanding -= op->kind != PK_OP_WARM_UP;
    if (op->ticket)
        op->ticket->outstanding--;
    op->kind = PK_OP_FREE;
    op->next = core->free_ops;
    core->free_ops = op;
}

bool pk_op_known(const pk_core *core, const pk_op *op)
{
    for (const pk_op_chunk *chunk = core->chunks; chunk; chunk = chunk->next) {
        uintptr_t offset = (uintptr_t)op - (uintptr_t)chunk->ops;
        if (offset < OPS_PER_CHUNK * sizeof *op && offset % sizeof *op == 0)
            return op->kind != PK_OP_FREE;
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
