/* What there is once per network card: domain and completion queue; and memory and endpoints on it. */

#include "core.h"

#include <stdlib.h>
#include <string.h>

typedef union {
    struct fi_cq_attr cq;
    struct fi_av_attr av;
    struct fi_mr_attr mr;
    unsigned char room[PK_ROOM];
} attributes;

static void close_fid(struct fid *fid)
{
    if (fid)
        fid->ops->close(fid);
}

static int open_queue(pk_rail *rail, int wait_object)
{
    attributes attr = {.room = {0}};
    int fd = -1;

    attr.cq.size = PK_COMPLETIONS;
    attr.cq.format = FI_CQ_FORMAT_DATA;
    attr.cq.wait_obj = wait_object;
    int error = rail->domain->ops->cq_open(rail->domain, &attr, &rail->cq, NULL);
    if (error)
        rail->cq = NULL;
    else if (wait_object == FI_WAIT_FD && !rail->cq->fid.ops->control(&rail->cq->fid, FI_GETWAIT, &fd))
        rail->wait_fd = fd;
    return error;
}

int pk_rail_open(pk_rail *rail, const pk_library *library, const pk_options *options, pk_failure *failure)
{
    int error;

    memset(rail, 0, sizeof *rail);
    rail->wait_fd = -1;
    int code = pk_library_offer(library, options, &rail->info, failure);
    if (code)
        return code;
    error = library->fabric(rail->info->fabric_attr, &rail->fabric, NULL);
    if (error)
        return pk_fail(library, failure, PK_FABRIC, "fi_fabric", error);
    error = rail->fabric->ops->domain(rail->fabric, rail->info, &rail->domain, NULL);
    if (error)
        return pk_fail(library, failure, PK_FABRIC, "fi_domain", error);

    /* rxm leaves an endpoint's descriptors in its queue's wait set when the endpoint is closed, and then reads through
     * them (libfabric 1.17). So look at that one now and then instead. */
    rail->over_rxm = strstr(rail->info->fabric_attr->prov_name, ";ofi_rxm") != NULL;
    error = open_queue(rail, rail->over_rxm ? FI_WAIT_NONE : FI_WAIT_FD);
    if (error && !rail->over_rxm)
        error = open_queue(rail, FI_WAIT_NONE); /* shm, for one, has nothing to wait on */
    if (error)
        return pk_fail(library, failure, PK_FABRIC, "fi_cq_open", error);
    rail->depth = options->tx_depth;
    if (rail->info->tx_attr->size && rail->info->tx_attr->size < rail->depth)
        rail->depth = (uint32_t)rail->info->tx_attr->size;
    return PK_OK;
}

void pk_rail_close(pk_rail *rail, const pk_library *library)
{
    close_fid(rail->cq ? &rail->cq->fid : NULL);
    close_fid(rail->domain ? &rail->domain->fid : NULL);
    close_fid(rail->fabric ? &rail->fabric->fid : NULL);
    if (rail->info)
        library->freeinfo(rail->info);
    memset(rail, 0, sizeof *rail);
    rail->wait_fd = -1;
}

int pk_rail_register(pk_rail *rail, const pk_library *library, pk_memory *memory, int interface, uint64_t wanted_key,
                     pk_failure *failure)
{
    attributes attr = {.room = {0}};
    struct iovec range = {(void *)(uintptr_t)memory->address, memory->length};
    int mode = rail->info->domain_attr->mr_mode;
    size_t key_size = rail->info->domain_attr->mr_key_size;

    attr.mr.mr_iov = &range;
    attr.mr.iov_count = 1;
    attr.mr.access = FI_WRITE | FI_REMOTE_WRITE;
    attr.mr.requested_key = key_size < sizeof wanted_key ? wanted_key & ((1ULL << 8 * key_size) - 1) : wanted_key;
    attr.mr.iface = interface;
    int error = rail->domain->mr->regattr(&rail->domain->fid, &attr, 0, &memory->mr);
    if (error)
        return pk_fail(library, failure, PK_FABRIC, "fi_mr_regattr", error);
    memory->desc = memory->mr->mem_desc;
    memory->key = memory->mr->key;
    memory->remote_base = mode & FI_MR_VIRT_ADDR ? memory->address : 0;
    return PK_OK;
}

int pk_rail_open_endpoint(pk_rail *rail, const pk_library *library, pk_peer *peer, uint8_t *address, uint64_t *size,
                          pk_failure *failure)
{
    attributes attr = {.room = {0}};
    struct fid_ep *ep = NULL;
    size_t length = *size;
    const char *what = "fi_av_open";

    /* A table of its own: closing it forgets the peer's address whatever the provider thinks of removing one. */
    attr.av.type = FI_AV_TABLE;
    attr.av.count = 1;
    int error = rail->domain->ops->av_open(rail->domain, &attr, &peer->av, NULL);
    if (!error) {
        what = "fi_endpoint";
        error = rail->domain->ops->endpoint(rail->domain, rail->info, &ep, NULL);
    }
    if (!error) {
        what = "fi_ep_bind";
        error = ep->fid.ops->bind(&ep->fid, &peer->av->fid, 0);
    }
    if (!error)
        error = ep->fid.ops->bind(&ep->fid, &rail->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!error) {
        what = "fi_enable";
        error = ep->fid.ops->control(&ep->fid, FI_ENABLE, NULL);
    }
    if (!error) {
        what = "fi_getname";
        error = ep->cm->getname(&ep->fid, address, &length);
    }
    if (error) {
        close_fid(ep ? &ep->fid : NULL);
        pk_close_av(peer);
        return pk_fail(library, failure, PK_FABRIC, what, error);
    }
    *size = length;
    peer->ep = ep;
    return PK_OK;
}

int pk_rail_connect(const pk_library *library, pk_peer *peer, const uint8_t *address, pk_failure *failure)
{
    int count = peer->av->ops->insert(peer->av, address, 1, &peer->destination, 0, NULL);

    if (count != 1)
        return pk_fail(library, failure, PK_FABRIC, "fi_av_insert", count < 0 ? count : 0);
    return PK_OK;
}

void pk_close_av(pk_peer *peer)
{
    close_fid(peer->av ? &peer->av->fid : NULL);
    peer->av = NULL;
}
