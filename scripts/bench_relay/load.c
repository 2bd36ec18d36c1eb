/* Ask for replies or streams on N connections, check every byte of them, and print what they took as JSON.
 *
 *     load --port P --concurrency N --seconds S --warm S [--chunks N --interval-us I]
 *
 * One thread, epoll. Without --chunks each connection asks for one JSON reply after another; with it for
 * one stream after another, the first ones spread over the length of a stream so that they don't march in
 * step. A connection is kept as long as the server keeps it, as a client's pool would.
 *
 * latency: request sent until its last byte is read. ttft: request sent until the first byte of the body.
 * chunk_delay: an event's stamp, taken as the upstream sends it, until its last byte is read; one monotonic
 * clock serves both. Requests that start before --warm is over, or while the last ones are awaited, are
 * checked and counted, but not timed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "wire.h"

enum { MAX_HEAD = 8192, MAX_CLIENTS = 1024 };
static const uint64_t SECOND_NS = 1000000000u, GIVE_UP_NS = 5000000000u, PAUSE_AFTER_FAILURE_NS = 10000000u;

enum framing { BY_LENGTH, BY_CHUNKS, BY_CLOSE };
enum chunk_part { SIZE, EXTENSION, DATA, DATA_END, TRAILER };

struct client {
    int fd;                       /* -1: not connected */
    int busy, timed, fresh;       /* fresh: nothing was asked on this connection before */
    uint64_t start_at_ns;         /* when to ask next; 0: as soon as the last answer is there */
    uint64_t asked_ns, first_ns;  /* first_ns 0: no byte of the body yet */
    size_t head_len;              /* 0 once the head is done */
    int in_head, want_close;
    enum framing framing;
    enum chunk_part part;
    size_t left;                  /* of the body, or of the chunk */
    int trailer_len;              /* bytes of the trailer's present line */
    size_t body_len;
    unsigned events;
    size_t event_len;
    char head[MAX_HEAD];
    char event[EVENT_BYTES];
};

struct samples { uint32_t *ns; size_t n, cap; };

static struct client clients[MAX_CLIENTS];
static struct samples latency, ttft, chunk_delay;
static int port, concurrency = 1, epoll_fd, timer_fd;
static unsigned chunks, interval_us;
static uint64_t requests, requests_timed, events_seen, failed, connects, retried;
static uint64_t begin_ns, timed_from_ns, last_start_ns;
static int n_waiting, n_busy;
static char first_failure[200], request[1024], expected_reply[REPLY_BYTES];
static size_t request_len;

static void die(const char *what) { perror(what); exit(2); }

static void sample(struct samples *s, uint64_t ns) {
    if (s->n == s->cap && !(s->ns = realloc(s->ns, (s->cap = s->cap ? s->cap * 2 : 65536) * sizeof *s->ns))) die("realloc");
    s->ns[s->n++] = ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
}

static void hang_up(struct client *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void wait_until(struct client *c, uint64_t at_ns) {
    c->busy = 0;
    n_busy--;
    c->start_at_ns = at_ns;
    n_waiting++;
}

static void fail(struct client *c, const char *why) {
    if (!failed++) snprintf(first_failure, sizeof first_failure, "%s, after %zu bytes of the body; head: %.80s", why, c->body_len, c->head);
    for (char *p = first_failure; *p; p++)
        if (*p == '"' || *p == '\\' || (unsigned char)*p < ' ') *p = ' '; /* it goes into JSON */
    hang_up(c);
    wait_until(c, now_ns() + PAUSE_AFTER_FAILURE_NS);
}

/* Say whether a kept connection is still open: llama-server closes some without a word. */
static int still_open(struct client *c) {
    char byte;
    return recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

static void dial(struct client *c) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket");
    if (connect(c->fd, (struct sockaddr *)&at, sizeof at)) die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = c});
    connects++;
    c->fresh = 1;
}

static void ask(struct client *c) {
    if (c->fd >= 0 && chunks && !still_open(c)) hang_up(c);
    if (c->fd < 0) dial(c);
    c->in_head = 1;
    c->head_len = c->body_len = c->event_len = 0;
    c->events = 0;
    c->first_ns = 0;
    c->asked_ns = now_ns();
    c->timed = c->asked_ns >= timed_from_ns && c->asked_ns < last_start_ns;
    if (!c->busy) { c->busy = 1; n_busy++; }
    if (send(c->fd, request, request_len, MSG_NOSIGNAL) != (ssize_t)request_len) fail(c, "the request could not be sent");
}

/* The answer is whole: check its length, take the times, and go on. */
static void finish(struct client *c) {
    uint64_t now = now_ns();
    size_t want = chunks ? (size_t)chunks * EVENT_BYTES + sizeof DONE_EVENT - 1 : REPLY_BYTES;
    if (c->body_len != want || (chunks && c->events != chunks)) { fail(c, "a body of the wrong length"); return; }
    requests++;
    if (c->timed) {
        requests_timed++;
        sample(&latency, now - c->asked_ns);
        sample(&ttft, c->first_ns - c->asked_ns);
    }
    if (c->want_close || c->framing == BY_CLOSE) hang_up(c);
    c->fresh = 0;
    if (now >= last_start_ns || chunks) {
        /* a gap of up to one interval lets the phases of the streams drift apart */
        wait_until(c, now + (chunks ? (uint64_t)(random() % (interval_us + 1u)) * 1000u : 0));
        return;
    }
    ask(c);
}

static int check_event(struct client *c, uint64_t now) {
    char want[EVENT_BYTES], digits[STAMP_DIGITS + 1] = {0};
    memcpy(digits, c->event + STAMP_AT, STAMP_DIGITS);
    uint64_t sent_ns = strtoull(digits, NULL, 10);
    format_event(want, c->events, sent_ns);
    if (memcmp(want, c->event, EVENT_BYTES) || sent_ns > now) return 0;
    c->events++;
    events_seen++;
    if (c->timed) sample(&chunk_delay, now - sent_ns);
    return 1;
}

/* Take `len` decoded bytes of the body. Returns 0 when they are not what was asked for. */
static int take_body(struct client *c, const char *data, size_t len, uint64_t now) {
    if (!c->first_ns) c->first_ns = now;
    if (!chunks) {
        if (c->body_len + len > REPLY_BYTES || memcmp(expected_reply + c->body_len, data, len)) return 0;
        c->body_len += len;
        return 1;
    }
    c->body_len += len;
    while (len) {
        int last = c->events == chunks;
        size_t size = last ? sizeof DONE_EVENT - 1 : EVENT_BYTES, part = size - c->event_len;
        if (part > len) part = len;
        memcpy(c->event + c->event_len, data, part);
        data += part;
        len -= part;
        if ((c->event_len += part) < size) return 1;
        c->event_len = 0;
        if (last) return !memcmp(c->event, DONE_EVENT, size) && !len;
        if (!check_event(c, now)) return 0;
    }
    return 1;
}

/* Take bytes of a chunked body. Returns 1 at its end, 0 before, -1 when it is malformed or wrong. */
static int take_chunked(struct client *c, const char *data, size_t len, uint64_t now) {
    while (len) {
        if (c->part == DATA) {
            size_t part = c->left < len ? c->left : len;
            if (!take_body(c, data, part, now)) return -1;
            data += part;
            len -= part;
            if (!(c->left -= part)) { c->part = DATA_END; c->left = 2; }
            continue;
        }
        char byte = *data++;
        len--;
        switch (c->part) {
        case SIZE:
            if (byte >= '0' && byte <= '9') c->left = c->left * 16 + (size_t)(byte - '0');
            else if ((byte | 32) >= 'a' && (byte | 32) <= 'f') c->left = c->left * 16 + (size_t)((byte | 32) - 'a' + 10);
            else if (byte == '\r' || byte == ';') c->part = EXTENSION;
            else return -1;
            break;
        case EXTENSION:
            if (byte == '\n') { c->part = c->left ? DATA : TRAILER; c->trailer_len = 0; }
            break;
        case DATA_END:
            if (byte != (c->left == 2 ? '\r' : '\n')) return -1;
            if (!--c->left) c->part = SIZE;
            break;
        case TRAILER:
            if (byte == '\n') { if (!c->trailer_len) return len ? -1 : 1; c->trailer_len = 0; }
            else if (byte != '\r') c->trailer_len++;
            break;
        case DATA: break;
        }
    }
    return 0;
}

/* Read the head's status and framing. Returns 0 when it is not the success that was asked for. */
static int take_head(struct client *c) {
    c->in_head = 0;
    c->left = 0;
    c->part = SIZE;
    c->want_close = strcasestr(c->head, "\nconnection: close") != NULL;
    char *length = strcasestr(c->head, "\ncontent-length:");
    if (strcasestr(c->head, "\ntransfer-encoding: chunked")) c->framing = BY_CHUNKS;
    else if (length) { c->framing = BY_LENGTH; c->left = strtoul(length + 16, NULL, 10); }
    else c->framing = BY_CLOSE;
    return !strncmp(c->head, "HTTP/1.1 200", 12);
}

static void on_end_of_file(struct client *c) {
    if (!c->busy) { hang_up(c); return; }
    if (!c->in_head && c->framing == BY_CLOSE) { finish(c); return; }
    if (c->in_head && !c->head_len && !c->fresh) { /* closed just as we asked: ask once more, as clients do */
        retried++;
        uint64_t asked_ns = c->asked_ns;
        hang_up(c);
        ask(c);
        c->asked_ns = asked_ns;
        return;
    }
    fail(c, "the connection was closed early");
}

static void on_readable(struct client *c) {
    static char data[65536];
    if (c->fd < 0) return; /* an event that was reported before the connection was replaced */
    ssize_t got = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) { on_end_of_file(c); return; }
    if (!c->busy) { if (!failed++) snprintf(first_failure, sizeof first_failure, "bytes that nobody asked for"); hang_up(c); return; }
    uint64_t now = now_ns();
    const char *body = data;
    size_t len = (size_t)got;
    if (c->in_head) {
        size_t before = c->head_len, room = MAX_HEAD - 1 - before, part = len < room ? len : room;
        memcpy(c->head + before, data, part);
        c->head[c->head_len += part] = 0;
        char *end = strstr(c->head, "\r\n\r\n");
        if (!end) { if (part < len) fail(c, "a head without an end"); return; }
        size_t used = (size_t)(end + 4 - c->head) - before;
        end[2] = 0;
        if (!take_head(c)) { fail(c, "not a 200"); return; }
        body += used;
        len -= used;
    }
    if (!len) return;
    if (c->framing == BY_CHUNKS) {
        int state = take_chunked(c, body, len, now);
        if (state < 0) fail(c, "a wrong byte in a chunked body");
        else if (state) finish(c);
        return;
    }
    if (!take_body(c, body, len, now)) { fail(c, "a wrong byte in a body"); return; }
    if (c->framing == BY_LENGTH && c->body_len >= c->left) finish(c);
}

/* Ask on every connection whose time has come, and set the timer to the next. */
static void start_due(uint64_t now) {
    static uint64_t armed_ns;
    uint64_t next = 0;
    if (!n_waiting || now >= last_start_ns) return;
    for (int i = 0; i < concurrency; i++) {
        struct client *c = &clients[i];
        if (c->busy) continue;
        if (c->start_at_ns <= now) { n_waiting--; ask(c); }
        else if (!next || c->start_at_ns < next) next = c->start_at_ns;
    }
    if (!next || next == armed_ns) return;
    armed_ns = next;
    struct itimerspec at = {.it_value = {(time_t)(next / SECOND_NS), (long)(next % SECOND_NS)}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

static int by_size(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, struct samples *s) {
    if (!s->n) { printf(",\"%s_us\":null", name); return; }
    qsort(s->ns, s->n, sizeof *s->ns, by_size);
#define AT(q) ((double)s->ns[(size_t)((double)(s->n - 1) * (q))] / 1000.0)
    printf(",\"%s_us\":{\"n\":%zu,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", name, s->n, AT(0.5), AT(0.9), AT(0.99), AT(1.0));
}

int main(int argc, char **argv) {
    double seconds = 2, warm = 0.3;
    static const struct option options[] = {
        {"port", 1, 0, 'p'}, {"concurrency", 1, 0, 'c'}, {"seconds", 1, 0, 's'}, {"warm", 1, 0, 'w'},
        {"chunks", 1, 0, 'n'}, {"interval-us", 1, 0, 'i'}, {0, 0, 0, 0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (o == 'p') port = atoi(optarg);
        else if (o == 'c') concurrency = atoi(optarg);
        else if (o == 's') seconds = atof(optarg);
        else if (o == 'w') warm = atof(optarg);
        else if (o == 'n') chunks = (unsigned)atoi(optarg);
        else if (o == 'i') interval_us = (unsigned)atoi(optarg);
        else return 2;
    }
    if (!port || concurrency < 1 || concurrency > MAX_CLIENTS) { fprintf(stderr, "load: --port is needed; --concurrency is 1 to %d\n", MAX_CLIENTS); return 2; }

    char body[REQUEST_BYTES];
    format_request(body, chunks, interval_us);
    format_reply(expected_reply);
    request_len = (size_t)snprintf(request, sizeof request,
                                   "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: bench\r\nAccept: */*\r\n"
                                   "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%.*s",
                                   port, REQUEST_BYTES, REQUEST_BYTES, body);
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (epoll_fd < 0 || timer_fd < 0) die("epoll");
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = NULL});

    begin_ns = now_ns();
    timed_from_ns = begin_ns + (uint64_t)(warm * 1e9);
    last_start_ns = timed_from_ns + (uint64_t)(seconds * 1e9);
    uint64_t stream_ns = (uint64_t)chunks * interval_us * 1000u;
    for (int i = 0; i < concurrency; i++) {
        clients[i].fd = -1;
        clients[i].start_at_ns = begin_ns + stream_ns * (uint64_t)i / (uint64_t)concurrency;
    }
    n_waiting = concurrency;
    uint64_t now = begin_ns, give_up_ns = last_start_ns + stream_ns + GIVE_UP_NS;
    while ((now < last_start_ns || n_busy) && now < give_up_ns) {
        start_due(now);
        struct epoll_event events[256];
        int n = epoll_wait(epoll_fd, events, 256, 50);
        for (int i = 0; i < n; i++) {
            uint64_t count;
            if (events[i].data.ptr) on_readable(events[i].data.ptr);
            else if (read(timer_fd, &count, sizeof count) < 0) continue;
        }
        now = now_ns();
    }
    if (n_busy && !first_failure[0]) snprintf(first_failure, sizeof first_failure, "no end within %.0f s", (double)GIVE_UP_NS / 1e9);
    failed += (uint64_t)n_busy;

    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double wall_s = (double)(now - begin_ns) / 1e9;
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    printf("{\"wall_s\":%.3f,\"cpu_s\":%.3f,\"cpu_share\":%.3f,\"requests\":%llu,\"requests_per_s\":%.1f,\"events\":%llu,"
           "\"failed\":%llu,\"first_failure\":\"%s\",\"connects\":%llu,\"retried\":%llu",
           wall_s, cpu_s, cpu_s / wall_s, (unsigned long long)requests, (double)requests_timed / seconds,
           (unsigned long long)events_seen, (unsigned long long)failed, first_failure,
           (unsigned long long)connects, (unsigned long long)retried);
    print_samples("latency", &latency);
    print_samples("ttft", &ttft);
    print_samples("chunk_delay", &chunk_delay);
    puts("}");
    return 0;
}
