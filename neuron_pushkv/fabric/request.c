/* Requests, as the progress thread carries them out. */

#include "core.h"

#include <stdlib.h>

void pk_answer(pk_core *core, pk_request *request, int code)
{
    pthread_mutex_lock(&core->lock);
    request->code = code;
    request->answered = true;
    pthread_cond_broadcast(&core->answered);
    pthread_mutex_unlock(&core->lock);
}

/* Half of each completion queue is for our own writes, in equal shares. */
static void share_depth(pk_core *core)
{
    uint32_t peers = 0;

    for (const pk_peer *peer = core->first_peer; peer; peer = peer->next)
        peers++;
    core->depth = core->facts.tx_depth;
    if (peers && core->depth > PK_COMPLETIONS / 2 / peers)
        core->depth = PK_COMPLETIONS / 2 / peers;
    if (!core->depth)
        core->depth = 1;
}

static bool add(pk_core *core, pk_table *table, void *item, uint64_t *id, uint64_t *count)
{
    pthread_mutex_lock(&core->lock);
    bool added = pk_table_add(table, item, id);
    *count += added;
    pthread_mutex_unlock(&core->lock);
    return added;
}

static void drop(pk_core *core, pk_table *table, uint64_t id, uint64_t *count)
{
    pthread_mutex_lock(&core->lock);
    pk_table_remove(table, id);
    --*count;
    pthread_mutex_unlock(&core->lock);
}

static int do_register(pk_core *core, pk_request *request)
{
    if (!add(core, &core->memories, request->memory, &request->id, &core->counters.memories))
        return pk_fail(NULL, request->failure, PK_OUT_OF_MEMORY, "no memory for a registration", 0);
    int code = pk_memory_register(core, request->memory, request->failure);
    if (code)
        drop(core, &core->memories, request->id, &core->counters.memories);
    else
        request->size = pk_description_size(core, request->memory);
    return code;
}

static int do_deregister(pk_core *core, pk_request *request)
{
    pk_flush_wait(core);
    int code = pk_memory_close(core, request->memory, request->failure);

    if (!code)
        drop(core, &core->memories, request->id, &core->counters.memories);
    return code;
}

static int do_open_peer(pk_core *core, pk_request *request)
{
    pk_peer *peer = request->peer;

    if (!add(core, &core->peers, peer, &peer->id, &core->counters.peers))
        return pk_fail(NULL, request->failure, PK_OUT_OF_MEMORY, "no memory for a peer", 0);
    request->id = peer->id;
    int code = pk_endpoints_open(core, peer, request->contacts, request->failure);
    if (code) {
        drop(core, &core->peers, peer->id, &core->counters.peers);
        return code;
    }
    peer->next = core->first_peer;
    if (peer->next)
        peer->next->previous = peer;
    core->first_peer = peer;
    share_depth(core);
    return PK_OK;
}

static int do_fence(pk_core *core, pk_request *request)
{
    pk_peer *peer = request->peer;
    int code = pk_fence_now(core, peer, request->failure);

    if (code)
        return code;
    if (peer->previous)
        peer->previous->next = peer->next;
    else
        core->first_peer = peer->next;
    if (peer->next)
        peer->next->previous = peer->previous;
    share_depth(core);
    pthread_mutex_lock(&core->lock);
    pk_targets_free(core, peer);
    pthread_mutex_unlock(&core->lock);
    drop(core, &core->peers, peer->id, &core->counters.peers);
    return PK_OK;
}

static void do_cancel(pk_core *core, uint64_t id)
{
    for (pk_peer *peer = core->first_peer; peer; peer = peer->next) {
        pk_ticket *ticket = peer->first;
        while (ticket && ticket->id != id)
            ticket = ticket->next;
        if (ticket) {
            pk_ticket_stop(core, ticket, "cancelled");
            pk_ticket_settle(core, ticket);
            return;
        }
    }
}

void pk_do(pk_core *core, pk_request *request)
{
    int code = PK_OK;

    switch (request->kind) {
    case PK_DO_WRITE:
        pk_ticket_start(core, (pk_ticket *)request); /* its first member */
        return;
    case PK_DO_CANCEL:
        do_cancel(core, request->id);
        free(request);
        return;
    case PK_DO_REGISTER:
        code = do_register(core, request);
        break;
    case PK_DO_DEREGISTER:
        code = do_deregister(core, request);
        break;
    case PK_DO_OPEN_PEER:
        code = do_open_peer(core, request);
        break;
    case PK_DO_CONNECT:
        code = pk_endpoints_connect(core, request->peer, request->their_contacts, request->failure);
        break;
    case PK_DO_FENCE:
        code = do_fence(core, request);
        break;
    }
    pk_answer(core, request, code);
}
