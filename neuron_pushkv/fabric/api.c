/* The interface's calls: from any thread, answered by the progress thread. See also open.c, memory.c and slots.c. */

#include "core.h"

#include <stdlib.h>
#include <string.h>

static void queue(pk_core *core, pk_request *request)
{
    request->next = NULL;
    if (core->last_request)
        core->last_request->next = request;
    else
        core->requests = request;
    core->last_request = request;
    pk_kick(core);
}

/* Needs the lock, and lets go of it while waiting. */
static int ask(pk_core *core, pk_request *request)
{
    if (core->closing)
        return pk_fail(NULL, request->failure, PK_CLOSED, "the transport is closed", 0);
    queue(core, request);
    while (!request->answered)
        pthread_cond_wait(&core->answered, &core->lock);
    return request->code;
}

static int ask_from_outside(pk_core *core, pk_request *request)
{
    pthread_mutex_lock(&core->lock);
    int code = ask(core, request);
    pthread_mutex_unlock(&core->lock);
    return code;
}

static const char *bad_memory(const pk_core *core, uint64_t address, uint64_t length, uint32_t shift, bool dmabufs)
{
    if (!length || address + length < address || length > INT64_MAX)
        return "memory of no bytes, or beyond 64 bits";
    if (shift > PK_WHOLE || (length - 1) >> shift >= PK_MOST_PARTS)
        return "memory in too many parts";
    if (dmabufs && !core->facts.takes_dmabufs)
        return "this provider takes no descriptors of memory";
    return NULL;
}

int pk_register(pk_core *core, uint64_t address, uint64_t length, int interface, int device, uint32_t shift,
                const pk_dmabuf *dmabufs, uint64_t *id, uint64_t *description_size, pk_failure *failure)
{
    const char *problem = bad_memory(core, address, length, shift, dmabufs != NULL);
    pk_memory *memory = problem ? NULL : calloc(1, sizeof *memory);
    pk_request request = {.kind = PK_DO_REGISTER, .failure = failure, .memory = memory};

    if (problem)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, problem, 0);
    if (!memory)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for a registration", 0);
    memory->address = address;
    memory->length = length;
    memory->interface = interface;
    memory->device = device;
    memory->shift = shift;
    memory->dmabufs = dmabufs;
    int code = ask_from_outside(core, &request);
    if (code) {
        pk_memory_free(memory);
        return code;
    }
    *id = request.id;
    *description_size = request.size;
    return PK_OK;
}

int pk_deregister(pk_core *core, uint64_t id, pk_failure *failure)
{
    pk_request request = {.kind = PK_DO_DEREGISTER, .failure = failure, .id = id};
    int code;

    pthread_mutex_lock(&core->lock);
    pk_memory *memory = core->closing ? NULL : pk_table_get(&core->memories, id);
    if (core->closing) {
        code = pk_fail(NULL, failure, PK_CLOSED, "the transport is closed", 0);
    } else if (!memory || memory->leaving) {
        code = pk_fail(NULL, failure, PK_UNKNOWN_MEMORY, "that memory is not registered", 0);
    } else if (memory->users) {
        code = pk_fail(NULL, failure, PK_MEMORY_IN_USE, "writes from that memory are under way", 0);
    } else {
        memory->leaving = true;
        request.memory = memory;
        code = ask(core, &request);
        if (!code)
            pk_memory_free(memory);
        else if (pk_table_get(&core->memories, id) == memory)
            memory->leaving = false; /* may be tried again */
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

int pk_open_peer(pk_core *core, uint64_t *id, pk_contact *contacts, pk_failure *failure)
{
    pk_peer *peer = calloc(1, sizeof *peer + core->rail_count * sizeof *peer->endpoints);
    pk_request request = {.kind = PK_DO_OPEN_PEER, .failure = failure, .peer = peer, .contacts = contacts};

    if (!peer)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for a peer", 0);
    int code = ask_from_outside(core, &request);
    if (code)
        free(peer);
    else
        *id = request.id;
    return code;
}

pk_peer *pk_usable_peer(pk_core *core, uint64_t id, pk_failure *failure)
{
    pk_peer *peer = core->closing ? NULL : pk_table_get(&core->peers, id);

    if (core->closing)
        pk_fail(NULL, failure, PK_CLOSED, "the transport is closed", 0);
    else if (!peer || peer->fencing)
        pk_fail(NULL, failure, PK_UNKNOWN_PEER, "that peer was never opened, or is fenced", 0);
    else
        return peer;
    return NULL;
}

int pk_connect(pk_core *core, uint64_t id, const pk_contact *contacts, uint32_t count, pk_failure *failure)
{
    pk_request request = {.kind = PK_DO_CONNECT, .failure = failure, .their_contacts = contacts};
    int code;

    for (uint32_t i = 0; i < count; i++) /* a provider reads as far as its own format goes, or to a zero */
        if (!contacts[i].size || contacts[i].size >= PK_ADDRESS_ROOM || contacts[i].address[contacts[i].size])
            return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "an address of impossible size", 0);
    if (!count)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "a peer without rails", 0);
    pthread_mutex_lock(&core->lock);
    pk_peer *peer = pk_usable_peer(core, id, failure);
    if (!peer) {
        code = failure->code;
    } else if (peer->connecting || peer->connected) {
        code = pk_fail(NULL, failure, PK_BAD_ARGUMENT, "that peer is connected already", 0);
    } else {
        request.peer = peer;
        peer->rails = count < core->rail_count ? count : core->rail_count;
        peer->connecting = true;
        code = ask(core, &request);
        if (pk_table_get(&core->peers, id) == peer) { /* not fenced meanwhile */
            peer->connecting = false;
            peer->connected = !code;
        }
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

int pk_fence(pk_core *core, uint64_t id, pk_failure *failure)
{
    pk_request request = {.kind = PK_DO_FENCE, .failure = failure};
    pk_peer *peer = NULL;
    int code = PK_OK;

    pthread_mutex_lock(&core->lock);
    while (!core->closing && (peer = pk_table_get(&core->peers, id)) && peer->fencing)
        pthread_cond_wait(&core->answered, &core->lock);
    if (core->closing) {
        code = pk_fail(NULL, failure, PK_CLOSED, "the transport is closed", 0);
    } else if (peer) {
        peer->fencing = true;
        request.peer = peer;
        code = ask(core, &request);
        if (!code)
            free(peer);
        else if (pk_table_get(&core->peers, id) == peer)
            peer->fencing = false; /* may be tried again */
        pthread_cond_broadcast(&core->answered);
    } else if (!pk_table_had(&core->peers, id)) {
        code = pk_fail(NULL, failure, PK_UNKNOWN_PEER, "that peer was never opened", 0);
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

int pk_write(pk_core *core, uint64_t peer, const pk_product *products, uint64_t product_count, uint32_t immediate,
             uint64_t ready, uint32_t ready_value, pk_receipt *receipt, pk_failure *failure)
{
    pk_ticket *ticket = pk_ticket_new(products, product_count, failure);
    int code = PK_OK;

    if (!ticket)
        return failure->code;
    ticket->request.kind = PK_DO_WRITE;
    ticket->immediate = immediate;
    ticket->ready = (const uint32_t *)(uintptr_t)ready;
    ticket->ready_value = ready_value;
    pthread_mutex_lock(&core->lock);
    ticket->peer = pk_usable_peer(core, peer, failure);
    if (!ticket->peer)
        code = failure->code;
    else if (!ticket->peer->connected)
        code = pk_fail(NULL, failure, PK_NOT_CONNECTED, "that peer is not connected yet", 0);
    else
        code = pk_ticket_map(core, ticket, products, failure);
    if (!code && !pk_events_owe(core))
        code = pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for an event", 0);
    if (code) {
        pk_ticket_free(ticket);
    } else {
        ticket->id = ++core->next_ticket;
        *receipt = (pk_receipt){ticket->id, ticket->writes, ticket->bytes};
        core->counters.tickets++;
        queue(core, &ticket->request);
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

int pk_cancel(pk_core *core, uint64_t ticket, pk_failure *failure)
{
    pk_request *request = calloc(1, sizeof *request);

    if (!request)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for a request", 0);
    request->kind = PK_DO_CANCEL;
    request->id = ticket;
    pthread_mutex_lock(&core->lock);
    if (core->closing)
        free(request);
    else
        queue(core, request);
    pthread_mutex_unlock(&core->lock);
    return PK_OK;
}
