/* A libcuda.so.1 for cuda.bindings and cuda.core: one device whose memory is this machine's, no kernels.
 *
 * It is as late as a driver may be: what is given to a stream is done when somebody waits for it, not before. A copy
 * whose end nobody awaits has not happened; memory that is allocated on one stream is not there for another one that
 * does not wait; freed memory counts until its stream has come so far. Page-locked memory is read and written then,
 * ordinary host memory at once, as CUDA says. Device memory cannot be touched by the host: a SIGSEGV.
 *
 * What a driver would answer with an illegal address is said on stderr, and from then on every call fails with 700.
 *   FAKE_CUDA_BYTES   memory of the device (256 MiB)
 *   FAKE_CUDA_FAIL    "name=code": what calls of that name answer
 *   FAKE_CUDA_NO_POOLS   if set, the device has no memory pools
 *   FAKE_CUDA_PAGE_TABLES  if set, the device reads ordinary memory by the host's page tables (Grace)
 *   FAKE_CUDA_PROMPT  if set, what is asked for by cuEventQuery and cuStreamQuery is done by then
 * fake_cuda_count(what): "events", "streams", "pushed" (contexts of this thread), "device" and "pinned" (bytes),
 *   "waiting" (what streams were given and nobody has waited for), "calls", "locks" (calls that lock host memory),
 *   "longest" (microseconds in which one of these kept all other calls waiting), "largest" (the most bytes that one of
 *   them locked), "untouched" (bytes of pages that it had to make itself), and "lost" (what each call fails with)
 * fake_cuda_mend(): calls are answered again; fake_cuda_lose(code): each call fails with it, as on a lost GPU;
 *   fake_cuda_lose_after(code, calls): the same once so many calls were answered
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 101, NO_CONTEXT = 201 };
enum { INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801 };
enum { HOST = 1, DEVICE = 2 }; /* as CUmemorytype */
enum { NON_BLOCKING = 1, MAX_PUSHED = 16 };

typedef uint64_t Address;

typedef struct {
    char bytes[64];
} Handle;

typedef struct {
    pid_t process;
    int file;
    size_t size;
    unsigned long long id;
} Exported; /* what a Handle has */

typedef struct Memory {
    struct Memory *next;
    Address at;
    size_t size, mapped;
    char *bytes; /* where the content is; for page-locked memory this is the address */
    int kind, live, pooled, registered;
    unsigned long long id;
    int file, opened; /* of exported memory, whose pages other processes map; how often memory of another one is open */
    Exported from;
} Memory;

typedef enum { COPY, SET, ALLOCATE, FREE, RECORD, WAIT } Kind;
typedef struct Stream Stream;

typedef struct Work {
    struct Work *next;
    Kind kind;
    unsigned long long number; /* in the order of calls, over all streams */
    Address to, from;
    size_t size;
    unsigned value, width;
    char *kept; /* what ordinary host memory held when it was given */
    Memory *memory;
    Stream *other;
    unsigned long long until;
} Work;

struct Stream {
    struct Stream *next;
    unsigned flags;
    Work *first, *last;
};

typedef struct {
    Stream *stream;
    unsigned long long number;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Memory *memories, *freed; /* addresses of what was freed are not used again */
static Stream legacy, per_thread = {.flags = 0}, all, *streams; /* all: of an event of the whole context */
static unsigned long long numbers, used, pinned, reserved_high, events, stream_count;
static int initialized, broken, context, pool, lost;
static long long lost_after = -1;
static unsigned char uuid[16]; /* of the first GPU of CUDA_VISIBLE_DEVICES, as cuInit finds it */
static uint64_t threshold;
static __thread void *pushed[MAX_PUSHED];
static __thread int depth;

static size_t device_bytes(void) {
    const char *given = getenv("FAKE_CUDA_BYTES");
    return given ? strtoull(given, NULL, 10) : (size_t)256 << 20;
}

static unsigned long long calls, locks, longest, largest, untouched;

static unsigned long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

static int planned(const char *name) {
    const char *given = getenv("FAKE_CUDA_FAIL");
    size_t length = strlen(name);
    return given && strncmp(given, name, length) == 0 && given[length] == '=' ? atoi(given + length + 1) : OK;
}

static int pools(void) { return !getenv("FAKE_CUDA_NO_POOLS"); }

static int illegal(const char *what, Address at, size_t size) {
    fprintf(stderr, "fake libcuda: %s: %zu bytes at %#llx\n", what, size, (unsigned long long)at);
    return broken = ILLEGAL_ADDRESS;
}

static int enter(const char *name, int needs_context) {
    pthread_mutex_lock(&lock);
    calls++;
    if (lost_after >= 0 && lost_after-- == 0)
        broken = lost;
    int answer = !initialized ? NOT_INITIALIZED : broken ? broken : planned(name);
    return answer ? answer : needs_context && (!depth || !pushed[depth - 1]) ? NO_CONTEXT : OK;
}

static int leave(int answer) {
    pthread_mutex_unlock(&lock);
    return answer;
}

#define ENTER(needs_context)                                                                                           \
    do {                                                                                                               \
        int refused = enter(__func__, needs_context);                                                                  \
        if (refused)                                                                                                   \
            return leave(refused);                                                                                     \
    } while (0)

static Memory *found(Address at, size_t size) {
    for (Memory *m = memories; m; m = m->next)
        if (m->at <= at && at + size <= m->at + m->size)
            return m;
    return NULL;
}

/* The allocation that begins at an address: where one ends, the next one may begin. */
static Memory *beginning(Address at, int kind) {
    Memory *m = found(at, 1);
    return m && m->at == at && m->kind == kind ? m : NULL;
}

/* Where the bytes at an address are; NULL for an address of the device at which none are. */
static char *bytes(Address at, size_t size) {
    Memory *m = found(at, size);
    if (m)
        return m->kind == HOST || m->live ? m->bytes + (at - m->at) : NULL;
    for (m = memories; m; m = m->next)
        if (m->kind == DEVICE && at < m->at + m->mapped && m->at < at + size)
            return NULL; /* beyond the end of an allocation */
    for (m = freed; m; m = m->next)
        if (at < m->at + m->mapped && m->at < at + size)
            return NULL;
    return (char *)at;
}

static Memory *reserve(size_t size, int kind) {
    Memory *m = calloc(1, sizeof *m);
    m->size = size;
    m->mapped = (size + 4095) / 4096 * 4096;
    m->kind = kind;
    m->id = ++numbers;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (kind == HOST ? MAP_POPULATE : 0); /* locked pages are there at once */
    m->bytes = mmap(NULL, m->mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
    void *shown = kind == HOST ? m->bytes : mmap(NULL, m->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    m->at = (Address)shown;
    m->next = memories;
    memories = m;
    *(kind == HOST ? &pinned : &used) += size;
    if (used > reserved_high)
        reserved_high = used;
    return m;
}

static void give_back(Memory *gone) {
    for (Memory **m = &memories; *m; m = &(*m)->next)
        if (*m == gone) {
            *m = gone->next;
            break;
        }
    *(gone->kind == HOST ? &pinned : &used) -= gone->size;
    if (!gone->registered)
        munmap(gone->bytes, gone->mapped);
    if (gone->file)
        close(gone->file);
    if (gone->kind == HOST) {
        free(gone);
    } else {
        gone->next = freed;
        freed = gone;
    }
}

static int drain(Stream *stream, unsigned long long until);
static int drain_until(unsigned long long number);

static int carry_out(Work *work) {
    char *to, *from;
    switch (work->kind) {
    case COPY:
        to = bytes(work->to, work->size);
        from = work->kept ? work->kept : bytes(work->from, work->size);
        if (!to || !from)
            return illegal(to ? "a copy from memory that is not there" : "a copy to memory that is not there",
                           to ? work->from : work->to, work->size);
        memmove(to, from, work->size);
        return OK;
    case SET:
        to = bytes(work->to, work->size);
        if (!to)
            return illegal("a fill of memory that is not there", work->to, work->size);
        for (size_t i = 0; i + work->width <= work->size; i += work->width)
            memcpy(to + i, &work->value, work->width);
        return OK;
    case ALLOCATE:
        memset(work->memory->bytes, 0xA5, work->memory->size); /* nobody may count on zeros */
        work->memory->live = 1;
        return OK;
    case FREE:
        if (!work->memory->live)
            return illegal("memory that is not there is freed", work->memory->at, work->memory->size);
        give_back(work->memory);
        return OK;
    case WAIT:
        return work->other == &all ? drain_until(work->until) : drain(work->other, work->until);
    case RECORD:
        return OK;
    }
    return INVALID;
}

static int drain(Stream *stream, unsigned long long until) {
    while (stream->first && stream->first->number <= until) {
        Work *work = stream->first;
        stream->first = work->next;
        if (!stream->first)
            stream->last = NULL;
        if (!broken)
            carry_out(work);
        free(work->kept);
        free(work);
    }
    return broken;
}

static int drain_all(int blocking_only) {
    drain(&legacy, ~0ULL);
    drain(&per_thread, ~0ULL);
    for (Stream *s = streams; s; s = s->next)
        if (!blocking_only || !(s->flags & NON_BLOCKING))
            drain(s, ~0ULL);
    return broken;
}

static int drain_until(unsigned long long number) {
    drain(&legacy, number);
    drain(&per_thread, number);
    for (Stream *s = streams; s; s = s->next)
        drain(s, number);
    return broken;
}

static Stream *stream_of(Stream *given) {
    if ((uintptr_t)given <= 1 || given == &legacy) /* an event has the stream itself */
        return &legacy;
    if ((uintptr_t)given == 2 || given == &per_thread)
        return &per_thread;
    for (Stream *s = streams; s; s = s->next)
        if (s == given)
            return s;
    return NULL;
}

static int give(Stream *stream, Work work) {
    if (stream == &legacy)
        drain_all(1); /* it waits for streams that block, and they for it */
    else if (!(stream->flags & NON_BLOCKING))
        drain(&legacy, ~0ULL);
    Work *new = malloc(sizeof *new);
    *new = work;
    new->next = NULL;
    new->number = ++numbers;
    *(stream->last ? &stream->last->next : &stream->first) = new;
    stream->last = new;
    return broken;
}

static int is_pageable(Address at, size_t size) { return !found(at, size) && bytes(at, size); }

/* Whether a copy touches page-locked memory and other memory, or two pieces of it, which CUDA refuses. */
static int is_across(Address at, size_t size) {
    if (found(at, size))
        return 0;
    for (Memory *m = memories; m; m = m->next)
        if (m->kind == HOST && at < m->at + m->size && m->at < at + size)
            return 1;
    return 0;
}

static int copy(Address to, Address from, size_t size, Stream *given) {
    Stream *stream = stream_of(given);
    if (!stream)
        return INVALID_HANDLE;
    if (is_across(to, size) || is_across(from, size))
        return INVALID;
    if (!bytes(to, size) && !found(to, size))
        return INVALID;
    if (!bytes(from, size) && !found(from, size))
        return INVALID;
    Work work = {.kind = COPY, .to = to, .from = from, .size = size};
    if (is_pageable(from, size)) {
        work.kept = malloc(size ? size : 1);
        memcpy(work.kept, (void *)from, size);
    }
    give(stream, work);
    return is_pageable(to, size) ? drain(stream, ~0ULL) : broken;
}

static int fill(Address at, unsigned value, unsigned width, size_t number, Stream *given) {
    Stream *stream = stream_of(given);
    if (!stream)
        return INVALID_HANDLE;
    if (!found(at, number * width))
        return INVALID;
    return give(stream, (Work){.kind = SET, .to = at, .size = number * width, .value = value, .width = width});
}

static long long waiting(void) {
    long long number = 0;
    Stream *own[] = {&legacy, &per_thread};
    for (int i = 0; i < 2; i++)
        for (Work *work = own[i]->first; work; work = work->next)
            number++;
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Work *work = stream->first; work; work = work->next)
            number++;
    return number;
}

long long fake_cuda_count(const char *what) {
    pthread_mutex_lock(&lock);
    long long answer = strcmp(what, "events") == 0    ? (long long)events
                       : strcmp(what, "streams") == 0 ? (long long)stream_count
                       : strcmp(what, "pushed") == 0  ? depth
                       : strcmp(what, "device") == 0  ? (long long)used
                       : strcmp(what, "pinned") == 0  ? (long long)pinned
                       : strcmp(what, "waiting") == 0 ? waiting()
                       : strcmp(what, "calls") == 0   ? (long long)calls
                       : strcmp(what, "locks") == 0   ? (long long)locks
                       : strcmp(what, "longest") == 0 ? (long long)longest
                       : strcmp(what, "largest") == 0 ? (long long)largest
                       : strcmp(what, "untouched") == 0 ? (long long)untouched
                       : strcmp(what, "lost") == 0      ? broken
                                                        : -1;
    pthread_mutex_unlock(&lock);
    return answer;
}

void fake_cuda_mend(void) {
    broken = 0;
    lost_after = -1;
}

void fake_cuda_lose(int code) { broken = code; }

void fake_cuda_lose_after(int code, long long number) {
    pthread_mutex_lock(&lock);
    lost = code;
    lost_after = number;
    pthread_mutex_unlock(&lock);
}

int cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    int answer = planned(__func__);
    if (!initialized) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        memset(uuid, 7, sizeof uuid);
        for (int i = 0, at = 4; visible && strncmp(visible, "GPU-", 4) == 0 && i < 16; i++, at += 2) {
            at += visible[at] == '-';
            if (sscanf(visible + at, "%2hhx", &uuid[i]) != 1)
                break;
        }
    }
    initialized = !answer;
    return leave(answer);
}

int cuDriverGetVersion(int *out) {
    *out = 13000;
    return OK;
}

int cuGetErrorName(int error, const char **out) {
    *out = error == OK                ? "CUDA_SUCCESS"
           : error == INVALID         ? "CUDA_ERROR_INVALID_VALUE"
           : error == NO_MEMORY       ? "CUDA_ERROR_OUT_OF_MEMORY"
           : error == NO_CONTEXT      ? "CUDA_ERROR_INVALID_CONTEXT"
           : error == NOT_SUPPORTED   ? "CUDA_ERROR_NOT_SUPPORTED"
           : error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                      : "CUDA_ERROR_UNKNOWN";
    return OK;
}

int cuGetErrorString(int error, const char **out) { return cuGetErrorName(error, out); }

int cuDeviceGet(int *out, int number) {
    ENTER(0);
    *out = number;
    return leave(number == 0 ? OK : NO_DEVICE);
}

int cuDeviceGetCount(int *out) {
    ENTER(0);
    *out = getenv("FAKE_CUDA_DEVICES") ? atoi(getenv("FAKE_CUDA_DEVICES")) : 1; /* with a context on each */
    return leave(OK);
}

int cuDeviceGetName(char *out, int size, int device) {
    (void)device;
    snprintf(out, (size_t)size, "fake");
    return OK;
}

int cuDeviceGetUuid(char *out, int device) {
    (void)device;
    memcpy(out, uuid, 16);
    return OK;
}

int cuDeviceTotalMem(size_t *out, int device) {
    (void)device;
    ENTER(0);
    *out = device_bytes();
    return leave(OK);
}

int cuDeviceGetAttribute(int *out, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 75: /* compute capability 9.0 */
        *out = 9;
        break;
    case 41: /* unified addressing */
        *out = 1;
        break;
    case 100: /* page tables of the host */
        *out = getenv("FAKE_CUDA_PAGE_TABLES") != NULL;
        break;
    case 115: /* memory pools */
        *out = pools();
        break;
    default:
        *out = 0;
    }
    return OK;
}

int cuDevicePrimaryCtxRetain(void **out, int device) {
    (void)device;
    ENTER(0);
    *out = &context;
    return leave(OK);
}

int cuDevicePrimaryCtxRelease(int device) {
    (void)device;
    return OK;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    ENTER(0);
    *flags = 0;
    *active = 1;
    return leave(OK);
}

int cuCtxPushCurrent(void *given) {
    ENTER(0);
    if (depth == MAX_PUSHED)
        return leave(INVALID);
    pushed[depth++] = given;
    return leave(OK);
}

int cuCtxPopCurrent(void **out) {
    pthread_mutex_lock(&lock); /* also after an error */
    calls++;
    if (!depth)
        return leave(NO_CONTEXT);
    depth--;
    if (out)
        *out = pushed[depth];
    return leave(broken);
}

int cuCtxSetCurrent(void *given) {
    ENTER(0);
    if (!depth)
        depth = 1;
    pushed[depth - 1] = given;
    return leave(OK);
}

int cuCtxGetCurrent(void **out) {
    ENTER(0);
    *out = depth ? pushed[depth - 1] : NULL;
    return leave(OK);
}

int cuCtxGetDevice(int *out) {
    ENTER(1);
    *out = 0;
    return leave(OK);
}

int cuCtxGetFlags(unsigned *out) {
    ENTER(1);
    *out = 0;
    return leave(OK);
}

int cuCtxSynchronize(void) {
    ENTER(1);
    return leave(drain_all(0));
}

int cuCtxRecordEvent(void *given, Event *event) {
    ENTER(0);
    *event = (Event){&all, numbers};
    return leave(given == &context ? OK : INVALID_HANDLE);
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(1);
    *least = *greatest = 0;
    return leave(OK);
}

int cuStreamCreateWithPriority(Stream **out, unsigned flags, int priority) {
    (void)priority;
    ENTER(1);
    *out = calloc(1, sizeof **out);
    (*out)->flags = flags;
    (*out)->next = streams;
    streams = *out;
    stream_count++;
    return leave(OK);
}

int cuStreamCreate(Stream **out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

int cuStreamDestroy(Stream *given) {
    ENTER(0);
    for (Stream **s = &streams; *s; s = &(*s)->next)
        if (*s == given) {
            drain(given, ~0ULL);
            *s = given->next;
            free(given);
            stream_count--;
            return leave(broken);
        }
    return leave(INVALID_HANDLE);
}

int cuStreamSynchronize(Stream *given) {
    ENTER(1);
    Stream *stream = stream_of(given);
    if (stream == &legacy)
        drain_all(1);
    return leave(stream ? drain(stream, ~0ULL) : INVALID_HANDLE);
}

int cuStreamQuery(Stream *given) {
    ENTER(1);
    Stream *stream = stream_of(given);
    if (stream && getenv("FAKE_CUDA_PROMPT"))
        drain(stream, ~0ULL);
    return leave(!stream ? INVALID_HANDLE : stream->first ? NOT_READY : OK);
}

int cuStreamGetFlags(Stream *given, unsigned *out) {
    ENTER(0);
    Stream *stream = stream_of(given);
    *out = stream ? stream->flags : 0;
    return leave(stream ? OK : INVALID_HANDLE);
}

int cuStreamGetPriority(Stream *given, int *out) {
    (void)given;
    *out = 0;
    return OK;
}

int cuStreamGetCtx(Stream *given, void **out) {
    ENTER(0);
    *out = &context;
    return leave(stream_of(given) ? OK : INVALID_HANDLE);
}

int cuStreamIsCapturing(Stream *given, int *out) {
    (void)given;
    *out = 0;
    return OK;
}

int cuStreamWaitEvent(Stream *given, Event *event, unsigned flags) {
    (void)flags;
    ENTER(1);
    Stream *stream = stream_of(given);
    if (!stream || !event)
        return leave(INVALID_HANDLE);
    if (!event->stream)
        return leave(OK);
    return leave(give(stream, (Work){.kind = WAIT, .other = event->stream, .until = event->number}));
}

int cuEventCreate(Event **out, unsigned flags) {
    (void)flags;
    ENTER(1);
    *out = calloc(1, sizeof **out);
    events++;
    return leave(OK);
}

int cuEventDestroy(Event *event) {
    pthread_mutex_lock(&lock); /* also after an error */
    calls++;
    free(event);
    events--;
    return leave(broken);
}

int cuEventRecord(Event *event, Stream *given) {
    ENTER(1);
    Stream *stream = stream_of(given);
    if (!stream)
        return leave(INVALID_HANDLE);
    int answer = give(stream, (Work){.kind = RECORD});
    *event = (Event){stream, numbers};
    return leave(answer);
}

int cuEventSynchronize(Event *event) {
    ENTER(1);
    if (event->stream == &all)
        return leave(drain_until(event->number));
    return leave(event->stream && stream_of(event->stream) ? drain(event->stream, event->number) : broken);
}

int cuEventQuery(Event *event) {
    ENTER(1);
    if (getenv("FAKE_CUDA_PROMPT"))
        drain_until(event->number);
    if (event->stream == &all)
        return leave(waiting() ? NOT_READY : OK);
    Stream *stream = event->stream ? stream_of(event->stream) : NULL;
    return leave(stream && stream->first && stream->first->number <= event->number ? NOT_READY : OK);
}

int cuMemGetInfo(size_t *free_bytes, size_t *total) {
    ENTER(1);
    *total = device_bytes();
    *free_bytes = *total - used;
    return leave(OK);
}

static int allocate(Address *out, size_t size, Stream *stream) {
    if (!size)
        return INVALID;
    if (used + size > device_bytes() && stream)
        drain(stream, ~0ULL); /* what was freed on a stream can be had again there */
    if (used + size > device_bytes())
        return NO_MEMORY;
    Memory *m = reserve(size, DEVICE);
    *out = m->at;
    Work work = {.kind = ALLOCATE, .memory = m};
    m->pooled = stream != NULL;
    return stream ? give(stream, work) : carry_out(&work);
}

int cuMemAlloc(Address *out, size_t size) {
    ENTER(1);
    return leave(allocate(out, size, NULL));
}

int cuMemFree(Address at) {
    ENTER(1);
    drain_all(0); /* it waits for the device */
    Memory *m = beginning(at, DEVICE);
    if (!m)
        return leave(INVALID);
    give_back(m);
    return leave(broken);
}

int cuMemAllocFromPoolAsync(Address *out, size_t size, void *from, Stream *given) {
    ENTER(1);
    Stream *stream = stream_of(given);
    return leave(!stream || from != &pool ? INVALID_HANDLE : allocate(out, size, stream));
}

int cuMemAllocAsync(Address *out, size_t size, Stream *given) {
    ENTER(1);
    Stream *stream = stream_of(given);
    return leave(!pools() ? NOT_SUPPORTED : stream ? allocate(out, size, stream) : INVALID_HANDLE);
}

int cuMemFreeAsync(Address at, Stream *given) {
    ENTER(1);
    Stream *stream = stream_of(given);
    Memory *m = beginning(at, DEVICE);
    if (!stream || !m)
        return leave(INVALID);
    return leave(give(stream, (Work){.kind = FREE, .memory = m}));
}

static void note_lock(unsigned long long since, size_t size) {
    unsigned long long took = now_us() - since;
    locks++;
    largest = size > largest ? size : largest;
    longest = took > longest ? took : longest;
}

int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    (void)flags;
    ENTER(1);
    unsigned long long since = now_us();
    *out = (void *)reserve(size, HOST)->at;
    untouched += size;
    note_lock(since, size);
    return leave(OK);
}

int cuMemHostRegister(void *given, size_t size, unsigned flags) {
    (void)flags;
    ENTER(1);
    if (found((Address)given, 1) || is_across((Address)given, size))
        return leave(712); /* already registered */
    unsigned char there[4096]; /* whether each page is */
    for (size_t at = 0; at < size; at += sizeof there * 4096) {
        size_t part = size - at < sizeof there * 4096 ? size - at : sizeof there * 4096;
        mincore((char *)given + at, part, there);
        for (size_t i = 0; i < (part + 4095) / 4096; i++)
            untouched += there[i] & 1 ? 0 : 4096;
    }
    unsigned long long since = now_us();
    madvise(given, size, 23); /* MADV_POPULATE_WRITE: pages that nobody has touched are made now */
    Memory *m = calloc(1, sizeof *m);
    *m = (Memory){.next = memories, .at = (Address)given, .size = size, .mapped = size, .bytes = given, .kind = HOST};
    m->registered = 1;
    m->id = ++numbers;
    memories = m;
    pinned += size;
    note_lock(since, size);
    return leave(OK);
}

int cuMemHostUnregister(void *given) {
    ENTER(1);
    drain_all(0);
    Memory *m = beginning((Address)given, HOST);
    if (!m || !m->registered)
        return leave(713); /* not registered */
    give_back(m);
    return leave(broken);
}

int cuMemAllocHost(void **out, size_t size) { return cuMemHostAlloc(out, size, 0); }

int cuMemFreeHost(void *given) {
    ENTER(0);
    drain_all(0);
    Memory *m = beginning((Address)given, HOST);
    if (!m)
        return leave(INVALID);
    give_back(m);
    return leave(broken);
}

int cuMemcpyAsync(Address to, Address from, size_t size, Stream *stream) {
    ENTER(1);
    return leave(copy(to, from, size, stream));
}

int cuMemcpyDtoHAsync(void *to, Address from, size_t size, Stream *stream) {
    ENTER(1);
    return leave(copy((Address)to, from, size, stream));
}

int cuMemcpyHtoDAsync(Address to, const void *from, size_t size, Stream *stream) {
    ENTER(1);
    return leave(copy(to, (Address)from, size, stream));
}

int cuMemcpyDtoDAsync(Address to, Address from, size_t size, Stream *stream) {
    ENTER(1);
    return leave(copy(to, from, size, stream));
}

static int copy_now(Address to, Address from, size_t size) {
    int answer = copy(to, from, size, &legacy);
    return answer ? answer : drain(&legacy, ~0ULL);
}

int cuMemcpyDtoH(void *to, Address from, size_t size) {
    ENTER(1);
    return leave(copy_now((Address)to, from, size));
}

int cuMemcpyHtoD(Address to, const void *from, size_t size) {
    ENTER(1);
    return leave(copy_now(to, (Address)from, size));
}

int cuMemcpyDtoD(Address to, Address from, size_t size) {
    ENTER(1);
    return leave(copy(to, from, size, &legacy)); /* the host waits for none of these */
}

int cuMemsetD8(Address at, unsigned char value, size_t number) {
    ENTER(1);
    return leave(fill(at, value, 1, number, &legacy));
}

int cuMemsetD8Async(Address at, unsigned char value, size_t number, Stream *stream) {
    ENTER(1);
    return leave(fill(at, value, 1, number, stream));
}

int cuMemsetD16Async(Address at, unsigned short value, size_t number, Stream *stream) {
    ENTER(1);
    return leave(fill(at, value, 2, number, stream));
}

int cuMemsetD32Async(Address at, unsigned value, size_t number, Stream *stream) {
    ENTER(1);
    return leave(fill(at, value, 4, number, stream));
}

int cuDeviceGetMemPool(void **out, int device) {
    (void)device;
    ENTER(0);
    *out = &pool;
    return leave(pools() ? OK : NOT_SUPPORTED);
}

int cuDeviceGetDefaultMemPool(void **out, int device) { return cuDeviceGetMemPool(out, device); }

int cuMemGetMemPool(void **out, const void *location, int type) {
    (void)location;
    (void)type;
    return cuDeviceGetMemPool(out, 0);
}

int cuMemGetDefaultMemPool(void **out, const void *location, int type) { return cuMemGetMemPool(out, location, type); }

int cuMemPoolGetAttribute(void *from, int attribute, void *out) {
    ENTER(0);
    uint64_t *wide = out;
    if (from != &pool)
        return leave(INVALID_HANDLE);
    if (attribute <= 3)
        *(int *)out = 1;
    else
        *wide = attribute == 4 ? threshold : attribute == 5 || attribute == 7 ? used : reserved_high;
    return leave(OK);
}

int cuMemPoolSetAttribute(void *from, int attribute, void *value) {
    ENTER(0);
    if (attribute == 4)
        threshold = *(uint64_t *)value;
    return leave(from == &pool ? OK : INVALID_HANDLE);
}

static int attribute_of(void *out, int attribute, Memory *m) {
    switch (attribute) {
    case 1:
        *(void **)out = &context;
        return OK;
    case 2:
        *(unsigned *)out = (unsigned)m->kind;
        return OK;
    case 3:
    case 11:
        *(Address *)out = m->at;
        return OK;
    case 4:
        *(void **)out = m->kind == HOST ? m->bytes : NULL;
        return OK;
    case 7:
        *(unsigned long long *)out = m->id;
        return OK;
    case 8:
        *(unsigned *)out = 0;
        return OK;
    case 9:
        *(int *)out = 0;
        return OK;
    case 12:
        *(size_t *)out = m->size;
        return OK;
    case 17:
        *(void **)out = m->pooled ? &pool : NULL;
        return OK;
    default:
        return NOT_SUPPORTED;
    }
}

int cuMemGetAddressRange(Address *out, size_t *size, Address at) {
    ENTER(1);
    Memory *m = found(at, 1);
    if (!m)
        return leave(NOT_FOUND);
    if (out)
        *out = m->at;
    if (size)
        *size = m->size;
    return leave(OK);
}

int cuPointerGetAttribute(void *out, int attribute, Address at) {
    ENTER(0);
    Memory *m = found(at, 1);
    return leave(m ? attribute_of(out, attribute, m) : INVALID);
}

int cuPointerGetAttributes(unsigned number, const int *attributes, void **out, Address at) {
    ENTER(0);
    Memory *m = found(at, 1);
    for (unsigned i = 0; i < number; i++)
        if (m)
            attribute_of(out[i], attributes[i], m);
        else
            *(int *)out[i] = attributes[i] == 9 ? -2 : 0; /* not of CUDA */
    return leave(OK);
}

/* The pages become those of a file, which others open. A real driver does not say what becomes of memory that is freed,
 * or whose process ends, while another process has it open: here it stays, as it was. */
int cuIpcGetMemHandle(Handle *out, Address at) {
    ENTER(1);
    Memory *m = beginning(at, DEVICE);
    if (!m || m->pooled || m->opened)
        return leave(INVALID);
    if (!m->file) {
        m->file = memfd_create("exported", MFD_CLOEXEC);
        if (m->file < 0 || write(m->file, m->bytes, m->mapped) != (ssize_t)m->mapped)
            abort();
        mmap(m->bytes, m->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->file, 0);
    }
    memset(out, 0, sizeof *out);
    memcpy(out, &(Exported){getpid(), m->file, m->size, m->id}, sizeof(Exported));
    return leave(OK);
}

int cuIpcOpenMemHandle(Address *out, Handle handle, unsigned flags) {
    ENTER(1);
    Exported from;
    char path[64];
    memcpy(&from, &handle, sizeof from);
    if (flags != 1 || from.process == getpid())
        return leave(flags != 1 ? INVALID : NO_CONTEXT);
    for (Memory *m = memories; m; m = m->next)
        if (m->opened && m->from.process == from.process && m->from.id == from.id) {
            m->opened++;
            *out = m->at;
            return leave(OK);
        }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", from.process, from.file);
    int file = open(path, O_RDWR);
    if (file < 0)
        return leave(INVALID_HANDLE);
    Memory *m = reserve(from.size, DEVICE);
    used -= m->size; /* it counts where it was allocated */
    mmap(m->bytes, m->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    close(file);
    m->live = m->opened = 1;
    m->from = from;
    *out = m->at;
    return leave(OK);
}

int cuIpcCloseMemHandle(Address at) {
    ENTER(1);
    Memory *m = beginning(at, DEVICE);
    if (!m || !m->opened)
        return leave(INVALID);
    drain_all(0);
    if (!--m->opened) {
        used += m->size;
        give_back(m);
    }
    return leave(broken);
}

/* The versions that a program gets by name; the first ones have other arguments. */
#define VERSION_2(name) extern __typeof__(name) name##_v2 __attribute__((alias(#name)))
VERSION_2(cuCtxPushCurrent);
VERSION_2(cuCtxPopCurrent);
VERSION_2(cuMemGetInfo);
VERSION_2(cuDevicePrimaryCtxRelease);

#define KNOWN(name)                                                                                                    \
    { #name, (void *)name }
static const struct {
    const char *name;
    void *call;
} known[] = {
    KNOWN(cuInit), KNOWN(cuDriverGetVersion), KNOWN(cuGetErrorName), KNOWN(cuGetErrorString), KNOWN(cuDeviceGet),
    KNOWN(cuDeviceGetCount), KNOWN(cuDeviceGetName), KNOWN(cuDeviceGetUuid), KNOWN(cuDeviceTotalMem),
    KNOWN(cuDeviceGetAttribute), KNOWN(cuDevicePrimaryCtxRetain), KNOWN(cuDevicePrimaryCtxRelease),
    KNOWN(cuCtxPushCurrent), KNOWN(cuCtxPopCurrent), KNOWN(cuCtxSetCurrent), KNOWN(cuCtxGetCurrent),
    KNOWN(cuCtxGetDevice), KNOWN(cuCtxSynchronize), KNOWN(cuCtxRecordEvent), KNOWN(cuCtxGetStreamPriorityRange),
    KNOWN(cuStreamCreateWithPriority), KNOWN(cuStreamCreate), KNOWN(cuStreamDestroy), KNOWN(cuStreamSynchronize),
    KNOWN(cuStreamQuery), KNOWN(cuStreamGetFlags), KNOWN(cuStreamGetPriority), KNOWN(cuStreamGetCtx),
    KNOWN(cuStreamIsCapturing), KNOWN(cuStreamWaitEvent), KNOWN(cuEventCreate), KNOWN(cuEventDestroy),
    KNOWN(cuEventRecord), KNOWN(cuEventSynchronize), KNOWN(cuEventQuery), KNOWN(cuMemGetInfo), KNOWN(cuMemAlloc),
    KNOWN(cuMemFree), KNOWN(cuMemAllocFromPoolAsync), KNOWN(cuMemAllocAsync), KNOWN(cuMemFreeAsync),
    KNOWN(cuMemHostRegister), KNOWN(cuMemHostUnregister), KNOWN(cuMemHostAlloc), KNOWN(cuMemAllocHost), KNOWN(cuMemFreeHost), KNOWN(cuMemcpyAsync), KNOWN(cuMemcpyDtoHAsync),
    KNOWN(cuMemcpyHtoDAsync), KNOWN(cuMemcpyDtoDAsync), KNOWN(cuMemsetD8Async), KNOWN(cuMemsetD16Async),
    KNOWN(cuMemsetD32Async), KNOWN(cuDeviceGetMemPool), KNOWN(cuDeviceGetDefaultMemPool), KNOWN(cuMemGetMemPool),
    KNOWN(cuMemGetDefaultMemPool), KNOWN(cuMemPoolGetAttribute), KNOWN(cuMemPoolSetAttribute),
    KNOWN(cuPointerGetAttribute), KNOWN(cuPointerGetAttributes), KNOWN(cuDevicePrimaryCtxGetState), KNOWN(cuCtxGetFlags),
    KNOWN(cuMemcpyDtoH), KNOWN(cuMemcpyHtoD), KNOWN(cuMemcpyDtoD), KNOWN(cuMemsetD8), KNOWN(cuMemGetAddressRange),
    KNOWN(cuIpcGetMemHandle), KNOWN(cuIpcOpenMemHandle), KNOWN(cuIpcCloseMemHandle),
};

/* Names come plain, whichever version is meant: each of the above has one meaning since CUDA 12. */
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    (void)version;
    (void)flags;
    *out = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i].name, name) == 0)
            *out = known[i].call;
    if (strcmp(name, "cuGetProcAddress") == 0)
        *out = (void *)cuGetProcAddress_v2;
    if (status)
        *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}
