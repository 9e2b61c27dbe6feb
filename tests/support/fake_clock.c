/* A clock that is wrong on one machine, for programs that are started with LD_PRELOAD: FAKE_CLOCK=HOST:SECONDS. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
    const char *wanted = getenv("FAKE_CLOCK");
    char host[65] = "";
    size_t length;
    if (wanted == NULL || gethostname(host, sizeof host - 1) != 0) return 0;
    length = strlen(host);
    return strncmp(wanted, host, length) == 0 && wanted[length] == ':' ? atol(wanted + length + 1) : 0;
}

/* Python's time.time() and datetime ask this one. */
int clock_gettime(clockid_t id, struct timespec *now) {
    int done = (int)syscall(SYS_clock_gettime, id, now);
    if (done == 0 && id == CLOCK_REALTIME) now->tv_sec += offset_s();
    return done;
}
