/* Both ends of benchmarks/router.py, as cheap as can be, because they share the machine's cores with what is measured.
 *
 *   router_peers mock MS PORT PORT           servers that answer in vLLM's wire format, on loopback: prefill legs at
 *                                            once, everything else MS milliseconds later (0: at once, too)
 *   router_peers closed PORT CLIENTS S BODY  clients that send their next request when they have their answer
 *   router_peers open PORT PER_S S BODY      requests at Poisson's times, whether answers have come or not
 *
 * BODY is a file. The clients print the seconds they ran, how many answers came, how many were wrong (not 200, or cut)
 * and then the time to the first byte of each body in microseconds, one a line: in `open` from the moment at which the
 * request should have been sent. One thread, epoll. No parser beyond what these messages need: a head ends with an empty
 * line; a body has a length, or is chunked and ends with its last chunk at the end of a read.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS = 40, GAP_NS = 50000000, ROOM = 65536, TIMES = 1 << 23 };

#define CHOICE "\"model\":\"tiny\",\"choices\":[{\"index\":0,\"text\":\" w226\",\"logprobs\":null,\"finish_reason\":"
static const char EVENT[] = "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1796000082," CHOICE
                            "null,\"stop_reason\":null,\"prompt_token_ids\":null,\"token_ids\":null}]}\n\n";
static const char ANSWER[] = "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1796000082," CHOICE
                             "\"length\",\"stop_reason\":null,\"token_ids\":null}],\"usage\":{\"prompt_tokens\":300,"
                             "\"total_tokens\":302,\"completion_tokens\":2},\"kv_transfer_params\":%s}";
static const char SAID[] = "{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_engine_id\":\"P0\","
                           "\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,\"remote_block_ids\":[],"
                           "\"remote_num_tokens\":300}";

struct peer {
    int fd, busy, left, headed, tokens, queued, streams;
    int64_t began, due;
    size_t have;
    char tail[5], in[ROOM];
    struct peer *next;
};

static int poller;
static char whole[2][2048], head_and_event[2048], event[1024], last[64];
static size_t whole_len[2], first_len, event_len, last_len;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void must(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
}

static struct peer *watch(int fd) {
    struct peer *p = calloc(1, sizeof *p);
    must(p != NULL, "calloc");
    p->fd = fd;
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = p};
    must(epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e) == 0, "epoll_ctl");
    return p;
}

static void put(int fd, const char *data, size_t len) { /* small messages on loopback: they fit, or the peer is gone */
    if (write(fd, data, len) < 0) return;
}

/* ------------------------------------------------------------ servers */

/* By when they are due: all of a queue wait equally long. */
static struct queue {
    struct peer *soonest, *latest;
    int64_t gap;
} first_bytes, tokens = {.gap = GAP_NS};

static void later(struct queue *q, struct peer *p) {
    p->due = now() + q->gap;
    p->next = NULL;
    if (q->latest) q->latest->next = p;
    else q->soonest = p;
    q->latest = p;
    p->queued = 1;
}

static struct peer *is_due(struct queue *q) {
    struct peer *p;
    while ((p = q->soonest) && p->due <= now()) {
        if (!(q->soonest = p->next)) q->latest = NULL;
        p->queued = 0;
        if (p->fd >= 0) return p;
        free(p); /* its connection has been closed */
    }
    return NULL;
}

static void begin(struct peer *p) {
    if (!p->streams) {
        put(p->fd, whole[0], whole_len[0]);
        return;
    }
    put(p->fd, head_and_event, first_len);
    p->tokens = 1;
    later(&tokens, p);
}

static void what_is_due(void) {
    struct peer *p;
    while ((p = is_due(&first_bytes))) begin(p);
    while ((p = is_due(&tokens))) {
        put(p->fd, event, event_len);
        if (++p->tokens < TOKENS) later(&tokens, p);
        else p->tokens = 0, put(p->fd, last, last_len);
    }
}

static void serve(struct peer *p) {
    ssize_t got = read(p->fd, p->in + p->have, sizeof p->in - 1 - p->have);
    if (got <= 0) {
        close(p->fd);
        p->fd = -1;
        if (!p->queued) free(p);
        return;
    }
    p->have += got;
    p->in[p->have] = 0;
    char *body = strstr(p->in, "\r\n\r\n"), *length = strcasestr(p->in, "content-length:");
    if (!body) return;
    body += 4;
    size_t want = length && length < body ? strtoul(length + 15, NULL, 10) : 0;
    if (p->have < (size_t)(body - p->in) + want) return;
    p->have = 0;
    if (strstr(body, "\"do_remote_decode\":true")) {
        put(p->fd, whole[1], whole_len[1]);
        return;
    }
    p->streams = strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true");
    if (first_bytes.gap) later(&first_bytes, p);
    else begin(p);
}

/* Milliseconds until something of `q` is due, at most `most`. */
static int wait_for(const struct queue *q, int most) {
    int64_t ms = q->soonest ? (q->soonest->due - now() + 999999) / 1000000 : most;
    return ms < 0 ? 0 : ms < most ? (int)ms : most;
}

static void mock(int count, char **ports) {
    char body[1024];
    for (int n = 0; n < 2; n++) {
        int len = snprintf(body, sizeof body, ANSWER, n ? SAID : "null");
        whole_len[n] = snprintf(whole[n], sizeof whole[n],
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", len, body);
    }
    event_len = snprintf(event, sizeof event, "%zx\r\n%s\r\n", strlen(EVENT), EVENT);
    first_len = snprintf(head_and_event, sizeof head_and_event,
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%s", event);
    last_len = snprintf(last, sizeof last, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    int listening[2];
    for (int n = 0; n < count && n < 2; n++) {
        int one = 1;
        struct sockaddr_in at = loopback(atoi(ports[n]));
        listening[n] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        setsockopt(listening[n], SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        must(bind(listening[n], (void *)&at, sizeof at) == 0 && listen(listening[n], 4096) == 0, "listen");
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = &listening[n]};
        must(epoll_ctl(poller, EPOLL_CTL_ADD, listening[n], &e) == 0, "epoll_ctl");
    }
    struct epoll_event found[256];
    for (;;) {
        int count = epoll_wait(poller, found, 256, wait_for(&first_bytes, wait_for(&tokens, 1000)));
        for (int n = 0; n < count; n++) {
            if (found[n].data.ptr == &listening[0] || found[n].data.ptr == &listening[1]) {
                int fd = accept4(*(int *)found[n].data.ptr, NULL, NULL, SOCK_NONBLOCK);
                if (fd >= 0) watch(fd);
            } else serve(found[n].data.ptr);
        }
        what_is_due();
    }
}

/* ------------------------------------------------------------ clients */

static char request[1 << 20];
static size_t request_len;
static long answers, wrong, lost, sent, timed;
static float *first_us;
static struct peer *idle;
static int again; /* whether a client sends its next request by itself */

static void ask(struct peer *p, int64_t began) {
    p->busy = 1, p->headed = 0, p->left = -1, p->have = 0, p->began = began;
    memset(p->tail, 0, sizeof p->tail);
    sent++;
    put(p->fd, request, request_len);
}

static struct peer *client(int port) {
    struct sockaddr_in at = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    must(fd >= 0 && connect(fd, (void *)&at, sizeof at) == 0, "connect");
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return watch(fd);
}

static void first_byte(struct peer *p) {
    if (timed < TIMES) first_us[timed++] = (now() - p->began) / 1e3f;
}

static void over(struct peer *p) {
    p->busy = 0;
    answers++;
    if (again) ask(p, now());
    else p->next = idle, idle = p;
}

static void hear(struct peer *p) {
    ssize_t got = read(p->fd, p->in + p->have, sizeof p->in - 1 - p->have);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        close(p->fd);
        if (p->busy) lost++;
        p->fd = -1; /* an idle one stays in the list, and is passed over */
        return;
    }
    char *data = p->in;
    size_t len = p->have + got;
    if (!p->headed) {
        p->in[len] = 0;
        char *body = strstr(p->in, "\r\n\r\n"), *length;
        if (!body) {
            p->have = len;
            return;
        }
        body += 4;
        p->headed = 1;
        if (strncmp(p->in, "HTTP/1.1 200", 12)) wrong++;
        length = strcasestr(p->in, "content-length:");
        p->left = length && length < body ? atoi(length + 15) : -1;
        len -= body - p->in;
        data = body;
        p->tokens = 0;
    }
    p->have = 0;
    if (!len) return;
    if (!p->tokens) p->tokens = 1, first_byte(p);
    if (p->left >= 0) {
        if ((p->left -= len) <= 0) over(p);
        return;
    }
    size_t keep = len < 5 ? len : 5;
    memmove(p->tail, p->tail + keep, 5 - keep);
    memcpy(p->tail + 5 - keep, data + len - keep, keep);
    if (!memcmp(p->tail, "0\r\n\r\n", 5)) over(p);
}

static void hear_all(int64_t until) {
    struct epoll_event found[256];
    struct timespec wait = {0};
    int64_t ns = until - now();
    if (ns > 0) wait.tv_sec = ns / 1000000000, wait.tv_nsec = ns % 1000000000;
    int count = epoll_pwait2(poller, found, 256, &wait, NULL);
    for (int n = 0; n < count; n++) hear(found[n].data.ptr);
}

static void load(int open_loop, int port, double rate, double seconds, const char *path) {
    static char body[sizeof request - 256];
    FILE *file = fopen(path, "rb");
    must(file != NULL, path);
    size_t len = fread(body, 1, sizeof body, file);
    request_len = snprintf(request, sizeof request,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", len);
    memcpy(request + request_len, body, len);
    request_len += len;
    first_us = calloc(TIMES, sizeof *first_us);
    must(first_us != NULL, "calloc");
    int64_t began = now(), end = began + (int64_t)(seconds * 1e9), next = began;
    srand48(1);
    if (open_loop) {
        while (next < end) {
            for (; next <= now() && next < end; next += (int64_t)(-log(1 - drand48()) / rate * 1e9)) {
                while (idle && idle->fd < 0) {
                    struct peer *gone = idle;
                    idle = idle->next;
                    free(gone);
                }
                struct peer *p = idle ? idle : client(port);
                if (idle) idle = idle->next;
                ask(p, next);
            }
            hear_all(next < end ? next : end);
        }
    } else {
        again = 1;
        for (int n = 0; n < (int)rate; n++) ask(client(port), now());
        while (now() < end) hear_all(end);
        again = 0;
    }
    double ran = (now() - began) / 1e9;
    for (int64_t late = now() + 10000000000LL; answers + lost < sent && now() < late;) hear_all(now() + 50000000);
    printf("%f %ld %ld\n", ran, answers, wrong + sent - answers);
    for (long n = 0; n < timed; n++) printf("%.1f\n", first_us[n]);
}

int main(int argc, char **argv) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    if (argc >= 4 && !strcmp(argv[1], "mock")) {
        first_bytes.gap = atoi(argv[2]) * 1000000LL;
        mock(argc - 3, argv + 3);
    }
    if (argc != 6) return 2;
    load(!strcmp(argv[1], "open"), atoi(argv[2]), atof(argv[3]), atof(argv[4]), argv[5]);
    return 0;
}
