/* Reading the completion queues, and fencing a peer. */

#include "core.h"

#include <stdio.h>
#include <string.h>

#define ENTRIES 64

static void count_error(pk_core *core)
{
    pthread_mutex_lock(&core->lock);
    core->counters.errors++;
    pthread_mutex_unlock(&core->lock);
}

/* A write into our memory, by its flags alone: length and context differ between providers. */
static bool is_arrival(uint64_t flags)
{
    return (flags & FI_REMOTE_CQ_DATA) && (flags & (FI_REMOTE_WRITE | FI_RMA)) && !(flags & FI_WRITE);
}

static void finish(pk_core *core, pk_op *op, bool good, const char *text)
{
    pk_ticket *ticket = op->ticket;
    pk_op_kind kind = op->kind;

    pk_op_release(core, op);
    if (kind == PK_OP_WARM_UP) {
        pk_warm_up_done(core, &op->peer->endpoints[op->rail], good);
    } else if (kind == PK_OP_FLUSH) {
        pk_flush_done(core, op, good);
    } else {
        if (good) {
            ticket->written++;
        } else {
            ticket->in_doubt++;
            pk_ticket_stop(core, ticket, text);
        }
        pk_ticket_settle(core, ticket);
    }
}

static bool read_error(pk_core *core, const pk_rail *rail)
{
    union {
        struct fi_cq_err_entry entry;
        unsigned char room[PK_ROOM];
    } error = {.room = {0}};
    struct fid_cq *cq = rail->cq;
    char provider_text[96] = "";
    char text[192];

    if (cq->ops->readerr(cq, &error, 0) <= 0)
        return false;
    pk_op *op = error.entry.op_context;
    bool ours = !is_arrival(error.entry.flags) && pk_op_known(core, op);
    if (!ours || op->kind != PK_OP_WARM_UP)
        count_error(core);
    if (!ours)
        return true; /* somebody's write into our memory went wrong; its sender learns of it */
    /* rxm asks the queue's first endpoint for its text, also when there is none left (libfabric 1.17) */
    const char *said = rail->over_rxm ? NULL : cq->ops->strerror(cq, error.entry.prov_errno, error.entry.err_data,
                                                                provider_text, sizeof provider_text);
    snprintf(text, sizeof text, "the write failed: %s (%d; provider: %d%s%.80s)",
             core->library.strerror(error.entry.err), error.entry.err, error.entry.prov_errno, said ? " " : "",
             said ? said : "");
    finish(core, op, false, text);
    return true;
}

static void account(pk_core *core, pk_rail *rail, const struct fi_cq_data_entry *entries, ssize_t count)
{
    uint64_t ended = 0, writes = 0, bytes = 0, unexpected = 0;
    pk_op *done[ENTRIES];

    for (ssize_t i = 0; i < count; i++) {
        pk_op *op = entries[i].op_context;
        if (is_arrival(entries[i].flags)) {
            rail->dirty = true;
            continue;
        }
        if (!op || op->kind == PK_OP_FREE || op->completed) {
            unexpected++;
            continue;
        }
        op->completed = true;
        done[ended++] = op;
        if (op->kind == PK_OP_WRITE) {
            writes++;
            bytes += op->length;
        }
    }
    pthread_mutex_lock(&core->lock);
    for (ssize_t i = 0; i < count; i++)
        if (is_arrival(entries[i].flags))
            pk_slot_count(core, (uint32_t)entries[i].data);
    core->counters.writes += writes;
    core->counters.bytes += bytes;
    rail->bytes += bytes;
    core->counters.unexpected += unexpected;
    pthread_mutex_unlock(&core->lock);
    for (uint64_t i = 0; i < ended; i++)
        finish(core, done[i], true, NULL);
}

static uint64_t complete_rail(pk_core *core, pk_rail *rail, int batches)
{
    struct fi_cq_data_entry entries[ENTRIES];
    uint64_t total = 0;

    for (int i = 0; batches < 0 || i < batches; i++) {
        ssize_t count = rail->cq->ops->read(rail->cq, entries, ENTRIES);
        if (count > 0) {
            account(core, rail, entries, count);
            total += (uint64_t)count;
        } else if (count == -FI_EAVAIL) {
            if (!read_error(core, rail))
                break;
            total++;
        } else {
            if (count && count != -FI_EAGAIN)
                count_error(core);
            break;
        }
    }
    return total;
}

uint64_t pk_complete(pk_core *core, int batches)
{
    uint64_t total = 0;

    for (uint32_t i = 0; i < core->rail_count; i++)
        total += complete_rail(core, &core->rails[i], batches);
    return total;
}

int pk_fence_now(pk_core *core, pk_peer *peer, pk_failure *failure)
{
    int code = pk_endpoints_close(core, peer, failure);

    if (code)
        return code;
    while (peer->ops) {
        pk_op *op = peer->ops;
        if (op->ticket)
            op->ticket->in_doubt++;
        pk_op_release(core, op);
    }
    while (peer->first)
        pk_ticket_stop(core, peer->first, "the peer was fenced");
    while (peer->draining) {
        pk_ticket_stop(core, peer->draining, "the peer was fenced");
        pk_ticket_settle(core, peer->draining);
    }
    return PK_OK;
}
