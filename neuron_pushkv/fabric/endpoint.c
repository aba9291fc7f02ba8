/* A peer's endpoints, one on each rail: opening, naming the other side's, closing. */

#include "core.h"

#include <string.h>

#define CLOSE_TRIES 1000
#define ROUNDS_BEFORE_CLOSE 8
#define LONGEST_SETTLING 5000000 /* nanoseconds */

static int open_door(const pk_rail *rail, pk_endpoint *endpoint)
{
    union {
        struct fi_mr_attr mr;
        unsigned char room[PK_ROOM];
    } attr = {.room = {0}};
    struct iovec range = {endpoint->door, sizeof endpoint->door};

    memset(endpoint->door[1], 1, PK_LINE);
    attr.mr.mr_iov = &range;
    attr.mr.iov_count = 1;
    attr.mr.access = FI_READ | FI_WRITE | FI_REMOTE_WRITE;
    attr.mr.requested_key = pk_secret_key(rail);
    int error = rail->domain->mr->regattr(&rail->domain->fid, &attr, 0, &endpoint->door_mr);
    if (error)
        endpoint->door_mr = NULL;
    return error;
}

static int set_option(struct fid_ep *ep, int name, const void *value, size_t size)
{
    return ep->ops->setopt(&ep->fid, FI_OPT_ENDPOINT, name, value, size);
}

/* What efa may not do to move data, while it can still be told: before the endpoint is enabled.
 *
 * Nothing through shared memory, whose writes a fence doesn't end, and which says of device memory that it was written
 * when it was not. Libraries that don't know this option (before 1.21) have FI_EFA_ENABLE_SHM_TRANSFER, which is set too.
 * Device memory from card to device only, and without calls of CUDA, which would wait for what its streams are at; the
 * option is refused where there is no CUDA, and libraries that don't know it (before 1.18) make no such calls. */
static int confine(const pk_rail *rail, struct fid_ep *ep, const char **what)
{
    const bool no = false;
    const int required = FI_HMEM_P2P_REQUIRED;

    *what = "fi_setopt of FI_OPT_SHARED_MEMORY_PERMITTED";
    int error = set_option(ep, FI_OPT_SHARED_MEMORY_PERMITTED, &no, sizeof no);
    if (error == -FI_ENOPROTOOPT)
        error = 0;
    if (!error && rail->interface != FI_HMEM_SYSTEM) {
        *what = "fi_setopt of FI_OPT_FI_HMEM_P2P, which asks for direct access of the card to the device";
        error = set_option(ep, FI_OPT_FI_HMEM_P2P, &required, sizeof required);
    }
    if (!error && rail->interface == FI_HMEM_CUDA) {
        *what = "fi_setopt of FI_OPT_CUDA_API_PERMITTED";
        error = set_option(ep, FI_OPT_CUDA_API_PERMITTED, &no, sizeof no);
        if (error == -FI_ENOPROTOOPT)
            error = 0;
    }
    return error;
}

static int open_one(pk_rail *rail, const pk_library *library, pk_endpoint *endpoint, pk_contact *contact,
                    pk_failure *failure)
{
    union {
        struct fi_av_attr av;
        unsigned char room[PK_ROOM];
    } attr = {.room = {0}};
    struct fid_domain *domain = rail->domain;
    size_t size = sizeof contact->address;
    const char *what = "fi_av_open";

    /* A table of its own: closing it forgets the peer's address whatever the provider thinks of removing one. */
    attr.av.type = FI_AV_TABLE;
    attr.av.count = 1;
    int error = domain->ops->av_open(domain, &attr, &endpoint->av, NULL);
    if (error) {
        endpoint->av = NULL;
    } else {
        what = "fi_endpoint";
        error = domain->ops->endpoint(domain, rail->info, &endpoint->ep, NULL);
        if (error)
            endpoint->ep = NULL;
    }
    struct fid_ep *ep = endpoint->ep;
    if (!error && rail->over_efa)
        error = confine(rail, ep, &what);
    if (!error) {
        what = "fi_ep_bind";
        error = ep->fid.ops->bind(&ep->fid, &endpoint->av->fid, 0);
    }
    if (!error)
        error = ep->fid.ops->bind(&ep->fid, &rail->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!error) {
        what = "fi_enable";
        error = ep->fid.ops->control(&ep->fid, FI_ENABLE, NULL);
    }
    if (!error) {
        what = "fi_getname";
        error = ep->cm->getname(&ep->fid, contact->address, &size);
    }
    if (!error) {
        what = "fi_mr_regattr";
        error = open_door(rail, endpoint);
    }
    if (error)
        return pk_fail(library, failure, PK_FABRIC, what, error);
    contact->size = size;
    contact->door = rail->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)endpoint->door : 0;
    contact->key = endpoint->door_mr->key;
    memcpy(endpoint->address, contact->address, sizeof endpoint->address);
    return PK_OK;
}

int pk_endpoints_open(pk_core *core, pk_peer *peer, pk_contact *contacts, pk_failure *failure)
{
    int code = PK_OK;

    for (uint32_t i = 0; i < core->rail_count && !code; i++)
        code = open_one(&core->rails[i], &core->library, &peer->endpoints[i], &contacts[i], failure);
    if (code) {
        pk_failure other;
        pk_endpoints_close(core, peer, &other); /* what was opened a moment ago has nothing under way */
    }
    return code;
}

int pk_endpoints_connect(pk_core *core, pk_peer *peer, const pk_contact *contacts, pk_failure *failure)
{
    for (uint32_t i = 0; i < peer->rails; i++) {
        pk_endpoint *endpoint = &peer->endpoints[i];
        int count = endpoint->av->ops->insert(endpoint->av, contacts[i].address, 1, &endpoint->destination, 0, NULL);
        if (count != 1)
            return pk_fail(&core->library, failure, PK_FABRIC, "fi_av_insert", count < 0 ? count : 0);
    }
    for (uint32_t i = 0; i < peer->rails; i++)
        pk_warm_up_begin(core, &peer->endpoints[i], &contacts[i]);
    return PK_OK;
}

/* tcp (seen with libfabric 2.5) reads freed memory where an endpoint is closed with its peer's connection request still
 * to be looked at: have it look first, and give a connection that is being made the time that a living peer needs. */
static void settle(pk_core *core, const pk_peer *peer)
{
    int64_t until = pk_now() + LONGEST_SETTLING;
    bool warming = true;

    for (int i = 0; i < ROUNDS_BEFORE_CLOSE || (warming && pk_now() < until); i++) {
        pk_warm_up(core);
        pk_complete(core, 1);
        warming = false;
        for (uint32_t j = 0; j < peer->rails; j++)
            warming |= peer->endpoints[j].warming && peer->endpoints[j].ep;
    }
}

int pk_endpoints_close(pk_core *core, pk_peer *peer, pk_failure *failure)
{
    int error = 0;

    settle(core, peer);
    for (uint32_t i = 0; i < core->rail_count; i++) {
        pk_endpoint *endpoint = &peer->endpoints[i];
        if (!endpoint->ep)
            continue;
        error = -FI_EAGAIN;
        for (int j = 0; error && j < CLOSE_TRIES; j++) {
            error = endpoint->ep->fid.ops->close(&endpoint->ep->fid);
            if (error)
                pk_complete(core, 1);
        }
        if (error)
            return pk_fail(&core->library, failure, PK_FABRIC, "fi_close of an endpoint", error);
        endpoint->ep = NULL;
        pk_warm_up_end(core, endpoint);
    }
    /* An endpoint that is closed makes no more completions: what isn't in the queue now never will be. */
    pk_complete(core, -1);
    for (uint32_t i = 0; i < core->rail_count; i++) {
        pk_endpoint *endpoint = &peer->endpoints[i];
        if (endpoint->av)
            endpoint->av->fid.ops->close(&endpoint->av->fid);
        if (endpoint->door_mr)
            endpoint->door_mr->fid.ops->close(&endpoint->door_mr->fid);
        endpoint->av = NULL;
        endpoint->door_mr = NULL;
    }
    return PK_OK;
}
