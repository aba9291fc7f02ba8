/* What there is once per network card: fabric, domain and completion queue. */

#include "core.h"

#include <string.h>
#include <sys/random.h>

static void close_fid(struct fid *fid)
{
    if (fid)
        fid->ops->close(fid);
}

static int open_queue(pk_rail *rail, int wait_object)
{
    union {
        struct fi_cq_attr cq;
        unsigned char room[PK_ROOM];
    } attr = {.room = {0}};
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

uint64_t pk_secret_key(const pk_rail *rail)
{
    size_t size = rail->info->domain_attr->mr_key_size;
    uint64_t key = 0;

    while (getrandom(&key, sizeof key, 0) != sizeof key)
        ; /* only a signal cuts it short, and only before the machine has gathered any randomness */
    return size && size < sizeof key ? key >> (64 - 8 * size) : key >> 1;
}

int pk_rail_open(pk_rail *rail, const pk_library *library, const pk_options *options, struct fi_info *info,
                 pk_failure *failure)
{
    memset(rail, 0, sizeof *rail);
    rail->wait_fd = -1;
    rail->info = info;
    int error = library->fabric(info->fabric_attr, &rail->fabric, NULL);
    if (error)
        return pk_fail(library, failure, PK_FABRIC, "fi_fabric", error);
    error = rail->fabric->ops->domain(rail->fabric, info, &rail->domain, NULL);
    if (error)
        return pk_fail(library, failure, PK_FABRIC, "fi_domain", error);

    /* rxm leaves an endpoint's descriptors in its queue's wait set when the endpoint is closed, and then reads through
     * them (libfabric 1.17). So look at that one now and then instead. */
    rail->over_rxm = strstr(info->fabric_attr->prov_name, ";ofi_rxm") != NULL;
    rail->over_efa = strcmp(info->fabric_attr->prov_name, "efa") == 0;
    rail->interface = pk_serves_device(options) ? options->interface : FI_HMEM_SYSTEM;
    error = open_queue(rail, rail->over_rxm ? FI_WAIT_NONE : FI_WAIT_FD);
    if (error && !rail->over_rxm)
        error = open_queue(rail, FI_WAIT_NONE); /* shm, for one, has nothing to wait on */
    if (error)
        return pk_fail(library, failure, PK_FABRIC, "fi_cq_open", error);
    rail->depth = options->tx_depth;
    if (info->tx_attr->size && info->tx_attr->size < rail->depth)
        rail->depth = (uint32_t)info->tx_attr->size;
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
