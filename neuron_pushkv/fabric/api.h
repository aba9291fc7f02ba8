/* The core's interface. cffi parses this file too, so it holds declarations only: no preprocessor lines. */

typedef struct pk_core pk_core;

enum {
    PK_ADDRESS_ROOM = 512, /* bytes; no provider's endpoint has a longer address */
    PK_MOST_RAILS = 32,
    PK_WHOLE = 63,       /* shift of memory that is registered in one part */
    PK_MOST_PARTS = 1024 /* of one memory */
};

/* Why a call failed. */
enum pk_code {
    PK_OK = 0,
    PK_NO_LIBRARY,     /* dlopen failed; text is the loader's */
    PK_NOT_LIBFABRIC,  /* a library, but not libfabric, or one without what we need */
    PK_TOO_OLD,
    PK_NO_PROVIDER,    /* not offered, or another came; text lists what is offered, separated by commas */
    PK_NO_HMEM,        /* the provider is there, but not for memory of a device */
    PK_NO_NIC,         /* text lists the network cards that there are, separated by commas */
    PK_NO_CPU,         /* the progress thread can't run on that CPU */
    PK_FABRIC,         /* a libfabric call failed; text names it and the reason */
    PK_BAD_ARGUMENT,   /* text says which */
    PK_UNKNOWN_PEER,   /* never opened, or fenced */
    PK_NOT_CONNECTED,
    PK_UNKNOWN_MEMORY,
    PK_UNKNOWN_TARGET, /* never attached for that peer */
    PK_MEMORY_IN_USE,  /* a ticket under way reads it */
    PK_NOT_EXPECTED,   /* no such (slot, epoch) is expected */
    PK_OUT_OF_MEMORY,
    PK_CLOSED
};

typedef struct {
    int code;
    int error;           /* the library's own number, negative, where it was that which failed; or 0 */
    uint32_t version;    /* of the library, from PK_TOO_OLD on */
    char library[1024];  /* path that it was loaded from, likewise */
    char text[512];
} pk_failure;

typedef struct {
    const char *library;      /* for dlopen: a path, or a name for the loader */
    const char *provider;     /* "efa", "tcp", "shm" */
    const char *fabric_name;  /* NULL, or the fabric within the provider ("efa-direct") */
    const char *host;         /* NULL, or the address to bind to */
    uint32_t least_version;   /* major << 16 | minor */
    uint32_t api_version;     /* newest API to ask for; the library's own is the limit */
    uint32_t tx_depth;        /* most writes under way per peer and rail; the provider's own is the limit */
    const char *nics;         /* NULL, or the network cards to use, separated by commas */
    uint32_t rails;           /* how many to open, over the cards in turn; 0: one for each card */
    uint64_t stripe;          /* longer writes are split at this many bytes where there are several rails */
    uint64_t most_registered; /* refuse to register more bytes at once, as some drivers do; 0: don't */
    int cpu;                  /* for the progress thread; -1: any */
    int interface;            /* FI_HMEM_* of the device whose memory will be registered besides the host's; 0: none */
    int flush;                /* whether the device must be read from before it sees what was written to it */
} pk_options;

typedef struct {
    uint32_t version;  /* major << 16 | minor */
    uint32_t address_format;
    char library[1024];  /* the path it was loaded from */
    char provider[64];
    char fabric[64];
    char domains[1024]; /* the network cards, rail by rail, separated by commas */
    uint32_t rails;
    uint64_t memory_mode;  /* FI_MR_* */
    uint64_t max_message;  /* bytes per write */
    uint64_t key_size;     /* bytes */
    uint32_t tx_depth;
    int takes_dmabufs;  /* whether memory of the device can be registered by descriptors */
    int waits;          /* whether the completion queue has a file descriptor to wait on */
} pk_facts;

/* Where a peer finds one of our endpoints: there is one per rail. */
typedef struct {
    uint64_t size; /* of the address */
    uint64_t door; /* remote address and key of a few bytes that anybody may write to, */
    uint64_t key;  /* which is how the way there is made ready before it is needed */
    uint8_t address[PK_ADDRESS_ROOM];
} pk_contact;

/* Memory as a file descriptor that a card's driver can map; offset: where in it the memory begins, in bytes. */
typedef struct {
    int fd;
    uint64_t offset;
} pk_dmabuf;

typedef struct {
    uint64_t memory;  /* handle from pk_register */
    uint64_t local;   /* virtual address where local offsets start */
    uint64_t target;  /* the peer's memory, from pk_attach */
    uint64_t offset;  /* in that memory, where remote offsets start */
} pk_span;

typedef struct {
    uint64_t local;   /* offset */
    uint64_t remote;  /* offset */
    uint64_t length;  /* bytes */
} pk_run;

typedef struct {
    const pk_span *spans;
    uint64_t span_count;
    const pk_run *runs;
    uint64_t run_count;
} pk_product;

typedef struct {
    uint64_t ticket;
    uint64_t writes;
    uint64_t bytes;
} pk_receipt;

enum pk_event_kind { PK_WRITTEN = 1, PK_FAILED, PK_ARRIVED };

typedef struct {
    int kind;
    uint32_t slot;
    uint32_t epoch;
    uint64_t count;
    uint64_t ticket;
    uint64_t written;
    uint64_t in_doubt;
    char detail[192];
} pk_event;

typedef struct {
    uint64_t writes;  /* completed */
    uint64_t bytes;   /* of those */
    uint64_t arrivals;
    uint64_t stale_arrivals;
    uint64_t errors;             /* completions in error, sent or received */
    uint64_t retries;            /* posts that the provider put off (EAGAIN) */
    uint64_t unexpected;         /* completions for nothing that is under way */
    uint64_t sleeps;             /* times the progress thread went to sleep */
    uint64_t wakeups;            /* times another thread had to wake it */
    uint64_t warm_ups;           /* ways to peers that were made ready before they were needed */
    uint64_t flushes;            /* reads that made what had arrived visible to its device */
    uint64_t outstanding;        /* writes under way now */
    uint64_t peers;              /* endpoints open now */
    uint64_t memories;           /* registrations now */
    uint64_t tickets;            /* tickets under way now */
} pk_counters;

/* Open a library, a provider and a progress thread. */
int pk_open(const pk_options *options, pk_core **core, pk_failure *failure);
/* End everything; other threads' calls return PK_CLOSED. Idempotent. */
void pk_close(pk_core *core);
/* After pk_close, when no call is under way any more. */
void pk_free(pk_core *core);
void pk_get_facts(pk_core *core, pk_facts *facts);
void pk_get_counters(pk_core *core, pk_counters *counters);
/* Bytes of completed writes by rail. */
void pk_get_rail_bytes(pk_core *core, uint64_t *bytes);

/* In parts of 1 << shift bytes, the last one shorter; PK_WHOLE makes it one. dmabufs: NULL, or one for each part on each
 * rail, rail by rail, all different; they stay the caller's, who may close them when this returns. What a peer has to
 * know of the memory is description_size bytes, which pk_describe stores. */
int pk_register(pk_core *core, uint64_t address, uint64_t length, int interface, int device, uint32_t shift,
                const pk_dmabuf *dmabufs, uint64_t *memory, uint64_t *description_size, pk_failure *failure);
int pk_describe(pk_core *core, uint64_t memory, uint8_t *description, pk_failure *failure);
int pk_deregister(pk_core *core, uint64_t memory, pk_failure *failure);

/* contacts: one is stored for each of our rails. */
int pk_open_peer(pk_core *core, uint64_t *peer, pk_contact *contacts, pk_failure *failure);
/* The peer's contacts, for each of its rails. Rails are paired by their number, and what one side has more is not used. */
int pk_connect(pk_core *core, uint64_t peer, const pk_contact *contacts, uint32_t count, pk_failure *failure);
/* Name memory of a connected peer by its description; until the fence. */
int pk_attach(pk_core *core, uint64_t peer, const uint8_t *description, uint64_t size, uint64_t *target,
              pk_failure *failure);
int pk_fence(pk_core *core, uint64_t peer, pk_failure *failure);

/* Copies the tables. ready is the address of a 32-bit word, or 0. */
int pk_write(pk_core *core, uint64_t peer, const pk_product *products, uint64_t product_count, uint32_t immediate,
             uint64_t ready, uint32_t ready_value, pk_receipt *receipt, pk_failure *failure);
/* A ticket that has ended, or never was, is left alone. */
int pk_cancel(pk_core *core, uint64_t ticket, pk_failure *failure);

int pk_expect(pk_core *core, uint32_t slot, uint32_t epoch, pk_failure *failure);
int pk_goal(pk_core *core, uint32_t slot, uint32_t epoch, uint64_t count, pk_failure *failure);
uint64_t pk_count(pk_core *core, uint32_t slot, uint32_t epoch);
void pk_forget(pk_core *core, uint32_t slot);

/* Wait up to timeout_ns for events; how many were stored, or -1 when closed. */
int pk_poll(pk_core *core, pk_event *events, int room, int64_t timeout_ns);
void pk_wake(pk_core *core);
