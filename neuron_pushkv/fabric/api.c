/* The interface's calls: from any thread, answered by the progress thread. Events and slots are in slots.c. */

#include "core.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

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

static int start(pk_core *core)
{
    pthread_condattr_t attr;

    pthread_mutex_init(&core->lock, NULL);
    pthread_cond_init(&core->answered, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&core->happened, &attr);
    pthread_condattr_destroy(&attr);
    return pthread_create(&core->thread, NULL, pk_progress, core);
}

static void describe(pk_core *core)
{
    const struct fi_info *info = core->rail.info;
    pk_facts *facts = &core->facts;

    facts->version = core->library.version;
    facts->address_format = info->addr_format;
    memcpy(facts->library, core->library.path, sizeof facts->library);
    snprintf(facts->provider, sizeof facts->provider, "%s", info->fabric_attr->prov_name);
    snprintf(facts->fabric, sizeof facts->fabric, "%s", info->fabric_attr->name ? info->fabric_attr->name : "");
    snprintf(facts->domain, sizeof facts->domain, "%s", info->domain_attr->name ? info->domain_attr->name : "");
    facts->memory_mode = (uint64_t)info->domain_attr->mr_mode;
    facts->max_message = info->ep_attr->max_msg_size ? info->ep_attr->max_msg_size : UINT64_MAX;
    facts->key_size = info->domain_attr->mr_key_size;
    facts->tx_depth = core->rail.depth;
    facts->waits = core->rail.wait_fd >= 0;
}

int pk_open(const pk_options *options, pk_core **opened, pk_failure *failure)
{
    pk_core *core = calloc(1, sizeof *core);

    if (!core)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for the core", 0);
    core->rail.wait_fd = -1;
    core->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    /* 16 MiB of which only the pages that are used are ever backed by memory */
    core->slots = calloc(PK_SLOTS, sizeof *core->slots);
    int code = PK_OUT_OF_MEMORY;
    if (core->wake_fd < 0 || !core->slots)
        pk_fail(NULL, failure, code, "no memory or descriptor for the core", 0);
    else
        code = pk_library_open(&core->library, options, failure);
    if (!code)
        code = pk_rail_open(&core->rail, &core->library, options, failure);
    if (!code) {
        describe(core);
        if (start(core))
            code = pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no thread could be started", 0);
    }
    if (code) {
        pk_rail_close(&core->rail, &core->library);
        if (core->wake_fd >= 0)
            close(core->wake_fd);
        free(core->slots);
        free(core);
        return code;
    }
    *opened = core;
    return PK_OK;
}

void pk_close(pk_core *core)
{
    pthread_mutex_lock(&core->lock);
    bool first = !core->closing;
    core->closing = true;
    pk_kick(core);
    pthread_cond_broadcast(&core->happened);
    pthread_mutex_unlock(&core->lock);
    if (first)
        pthread_join(core->thread, NULL);
    pthread_mutex_lock(&core->lock);
    core->closed |= first;
    pthread_cond_broadcast(&core->answered);
    while (!core->closed)
        pthread_cond_wait(&core->answered, &core->lock);
    pthread_mutex_unlock(&core->lock);
}

void pk_free(pk_core *core)
{
    pthread_cond_destroy(&core->answered);
    pthread_cond_destroy(&core->happened);
    pthread_mutex_destroy(&core->lock);
    close(core->wake_fd);
    free(core->events);
    free(core->slots);
    free(core);
}

void pk_get_facts(pk_core *core, pk_facts *facts)
{
    *facts = core->facts;
}

void pk_get_counters(pk_core *core, pk_counters *counters)
{
    pthread_mutex_lock(&core->lock);
    *counters = core->counters;
    pthread_mutex_unlock(&core->lock);
}

int pk_register(pk_core *core, uint64_t address, uint64_t length, int interface, uint64_t wanted_key, uint64_t *id,
                uint64_t *remote_base, uint64_t *key, pk_failure *failure)
{
    pk_memory *memory = calloc(1, sizeof *memory);
    pk_request request = {.kind = PK_DO_REGISTER, .failure = failure, .memory = memory, .interface = interface,
                          .wanted_key = wanted_key};

    if (!memory)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for a registration", 0);
    if (!length || address + length < address) {
        free(memory);
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "memory of no bytes, or beyond 64 bits", 0);
    }
    memory->address = address;
    memory->length = length;
    int code = ask_from_outside(core, &request);
    if (code) {
        free(memory);
        return code;
    }
    *id = request.id;
    *remote_base = request.remote_base;
    *key = request.key;
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
            free(memory);
        else if (pk_table_get(&core->memories, id) == memory)
            memory->leaving = false; /* may be tried again */
    }
    pthread_mutex_unlock(&core->lock);
    return code;
}

int pk_open_peer(pk_core *core, uint64_t *id, uint8_t *address, uint64_t *size, pk_failure *failure)
{
    pk_peer *peer = calloc(1, sizeof *peer);
    pk_request request = {.kind = PK_DO_OPEN_PEER, .failure = failure, .peer = peer, .address = address, .size = *size};

    if (!peer)
        return pk_fail(NULL, failure, PK_OUT_OF_MEMORY, "no memory for a peer", 0);
    int code = ask_from_outside(core, &request);
    if (code) {
        free(peer);
        return code;
    }
    *id = request.id;
    *size = request.size;
    return PK_OK;
}

/* Needs the lock. NULL, with the failure told, unless the peer may be used. */
static pk_peer *usable(pk_core *core, uint64_t id, pk_failure *failure)
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

int pk_connect(pk_core *core, uint64_t id, const uint8_t *address, uint64_t size, pk_failure *failure)
{
    uint8_t padded[PK_ADDRESS_ROOM] = {0}; /* a provider reads as far as its own format goes, or to a zero */
    pk_request request = {.kind = PK_DO_CONNECT, .failure = failure, .address = padded, .size = size};
    int code;

    if (!size || size >= sizeof padded)
        return pk_fail(NULL, failure, PK_BAD_ARGUMENT, "an address of impossible size", 0);
    memcpy(padded, address, size);
    pthread_mutex_lock(&core->lock);
    pk_peer *peer = usable(core, id, failure);
    if (!peer) {
        code = failure->code;
    } else if (peer->connecting || peer->connected) {
        code = pk_fail(NULL, failure, PK_BAD_ARGUMENT, "that peer is connected already", 0);
    } else {
        request.peer = peer;
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
    pk_ticket *ticket = pk_ticket_new(core, products, product_count, failure);
    int code = PK_OK;

    if (!ticket)
        return failure->code;
    ticket->request.kind = PK_DO_WRITE;
    ticket->immediate = immediate;
    ticket->ready = (const uint32_t *)(uintptr_t)ready;
    ticket->ready_value = ready_value;
    pthread_mutex_lock(&core->lock);
    ticket->peer = usable(core, peer, failure);
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
