/* A stand-in for llama-server that costs next to nothing, so that a proxy before it is what is measured.
 *
 * One thread, epoll. Heads, framing and habits are those of llama-server b10068, as seen on the wire:
 * a reply that is not streamed is one send; a streamed one is its head, then one send per chunk, then
 * `0\r\n` and `\r\n` apart, then the connection is closed though the head said keep-alive; every 100th
 * reply of a connection and every error says `Connection: close`; 5 s of silence close it.
 *
 * It takes llama-server's command line as far as a supervisor needs: --port and --host count, --version,
 * --help and --list-devices answer, everything else is ignored.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "wire.h"

enum { MAX_FD = 4096, MAX_REPLIES = 100, MAX_REQUEST = 16 << 20 };
static const uint64_t IDLE_NS = 5000000000ull;

struct conn {
    int fd;
    char *in;               /* what has arrived of the next request */
    size_t in_len, in_cap;
    unsigned replies;
    unsigned chunks, sent;  /* of the stream under way; chunks 0: none */
    uint64_t interval_ns, due_ns, active_ns;
};

static struct conn *conns[MAX_FD];
static struct conn *streams[MAX_FD];  /* those with a stream under way, in no order */
static int n_streams, epoll_fd, timer_fd;
static uint64_t armed_ns;             /* what the timer is set to; 0: not set */
static volatile sig_atomic_t stopping;

static void on_signal(int number) { (void)number; stopping = 1; }

static void die(const char *what) { perror(what); exit(1); }

static void end_stream(struct conn *c) {
    for (int i = 0; i < n_streams; i++)
        if (streams[i] == c) { streams[i] = streams[--n_streams]; break; }
    c->chunks = 0;
}

static void drop(struct conn *c) {
    if (c->chunks) end_stream(c);
    conns[c->fd] = NULL;
    close(c->fd);
    free(c->in);
    free(c);
}

/* Send all of it, or give the connection up: loopback buffers hold seconds of these streams, so a
 * reader that lets them run full has failed, and the load generator sees the cut. */
static int put(struct conn *c, const char *data, size_t len) {
    if (send(c->fd, data, len, MSG_NOSIGNAL) == (ssize_t)len) return 1;
    drop(c);
    return 0;
}

#define SERVER "Server: llama.cpp\r\n"
#define JSON "Content-Type: application/json; charset=utf-8\r\n"
#define CORS "Access-Control-Allow-Origin: \r\n"

/* Answer with JSON. Returns 0 when the connection is gone. */
static int reply(struct conn *c, int status, const char *body, size_t len, int want_close) {
    char out[8192];
    int closes = want_close || status != 200 || ++c->replies >= MAX_REPLIES;
    int head = snprintf(out, sizeof out, "HTTP/1.1 %s\r\n%s" JSON SERVER "Content-Length: %zu\r\n" CORS "\r\n",
                        status == 200 ? "200 OK" : "404 Not Found",
                        closes ? "Connection: close\r\n" : "Keep-Alive: timeout=5, max=100\r\n", len);
    memcpy(out + head, body, len);
    if (!put(c, out, (size_t)head + len)) return 0;
    if (closes) { drop(c); return 0; }
    return 1;
}

static int reply_text(struct conn *c, const char *body, int want_close) {
    return reply(c, 200, body, strlen(body), want_close);
}

static int send_event(struct conn *c) {
    static const char size_line[] = "c8\r\n"; /* EVENT_BYTES in hex */
    char out[sizeof size_line - 1 + EVENT_BYTES + 2];
    memcpy(out, size_line, sizeof size_line - 1);
    memcpy(out + sizeof out - 2, "\r\n", 2);
    format_event(out + sizeof size_line - 1, c->sent, now_ns());
    if (!put(c, out, sizeof out)) return 0;
    c->sent++;
    c->due_ns += c->interval_ns;
    if (c->sent < c->chunks) return 1;
    static const char done[] = "e\r\n" DONE_EVENT "\r\n";
    if (put(c, done, sizeof done - 1) && put(c, "0\r\n", 3) && put(c, "\r\n", 2)) drop(c);
    return 0;
}

static int start_stream(struct conn *c, unsigned chunks, unsigned interval_us, int want_close) {
    char head[400];
    int len = snprintf(head, sizeof head,
                       "HTTP/1.1 200 OK\r\n%sTransfer-Encoding: chunked\r\n" CORS "X-Accel-Buffering: no\r\n" SERVER
                       "%sContent-Type: text/event-stream\r\n\r\n",
                       want_close ? "" : "Keep-Alive: timeout=5, max=100\r\n", want_close ? "Connection: close\r\n" : "");
    if (!put(c, head, (size_t)len)) return 0;
    c->chunks = chunks;
    c->sent = 0;
    c->interval_ns = (uint64_t)interval_us * 1000u;
    c->due_ns = now_ns();
    streams[n_streams++] = c;
    return send_event(c);
}

#define SLOT(id) "{\"id\":" id ",\"n_ctx\":4096,\"speculative\":false,\"is_processing\":false}"

static const char PROPS[] =
    "{\"default_generation_settings\":{\"params\":{},\"n_ctx\":4096},\"total_slots\":4,\"model_alias\":\"bench\","
    "\"model_path\":\"bench.gguf\",\"modalities\":{\"vision\":false,\"audio\":false},\"endpoint_slots\":true,"
    "\"endpoint_props\":false,\"endpoint_metrics\":false,\"chat_template\":\"\",\"chat_template_caps\":{},"
    "\"bos_token\":\"\",\"eos_token\":\"\",\"build_info\":\"b1-bench\",\"is_sleeping\":false}";
static const char MODELS[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"aliases\":[\"bench\"],\"object\":\"model\",\"created\":1700000000,"
    "\"owned_by\":\"llamacpp\",\"meta\":{\"n_vocab\":256,\"n_ctx\":4096,\"n_ctx_train\":4096,\"n_embd\":64,"
    "\"n_params\":1,\"size\":1}}]}";
static const char COMPLETION[] =
    "{\"index\":0,\"content\":\"x\",\"tokens\":[],\"id_slot\":0,\"stop\":true,\"model\":\"bench\",\"tokens_predicted\":1,"
    "\"tokens_evaluated\":1,\"truncated\":false,\"stop_type\":\"limit\",\"tokens_cached\":1,\"timings\":{\"cache_n\":0,"
    "\"prompt_n\":1,\"prompt_ms\":1.0,\"predicted_n\":1,\"predicted_ms\":1.0}}";

static unsigned number_after(const char *text, size_t len, const char *name) {
    const char *at = memmem(text, len, name, strlen(name));
    return at ? (unsigned)strtoul(at + strlen(name), NULL, 10) : 0;
}

/* Answer one whole request; `in` is zero-terminated behind its body. Returns 0 when the connection is gone. */
static int answer(struct conn *c, const char *path, const char *body, size_t body_len, int want_close) {
    static char fixed_reply[REPLY_BYTES];
    if (!fixed_reply[0]) format_reply(fixed_reply);
    if (!strncmp(path, "/v1/chat/completions", 20)) {
        unsigned chunks = number_after(body, body_len, "chunks=");
        if (chunks) return start_stream(c, chunks, number_after(body, body_len, "interval_us="), want_close);
        return reply(c, 200, fixed_reply, REPLY_BYTES, want_close);
    }
    if (!strncmp(path, "/health", 7) || !strncmp(path, "/v1/health", 10))
        return reply_text(c, "{\"status\":\"ok\"}", want_close);
    if (!strncmp(path, "/props", 6)) return reply_text(c, PROPS, want_close);
    if (!strncmp(path, "/v1/models", 10) || !strncmp(path, "/models", 7)) return reply_text(c, MODELS, want_close);
    if (!strncmp(path, "/slots", 6))
        return reply_text(c, "[" SLOT("0") "," SLOT("1") "," SLOT("2") "," SLOT("3") "]", want_close);
    if (!strncmp(path, "/tokenize", 9)) return reply_text(c, "{\"tokens\":[1,2,3,4]}", want_close);
    if (!strncmp(path, "/completion", 11)) return reply_text(c, COMPLETION, want_close);
    static const char missing[] = "{\"error\":{\"message\":\"File Not Found\",\"type\":\"not_found_error\",\"code\":404}}";
    return reply(c, 404, missing, sizeof missing - 1, want_close);
}

/* Answer whatever requests have arrived whole. */
static void take_requests(struct conn *c) {
    while (!c->chunks) {
        char *end = memmem(c->in, c->in_len, "\r\n\r\n", 4);
        if (!end) return;
        *end = 0; /* the head is text now */
        char *length = strcasestr(c->in, "\ncontent-length:");
        size_t head = (size_t)(end - c->in) + 4, body = length ? strtoul(length + 16, NULL, 10) : 0;
        if (head + body > c->in_len) { *end = '\r'; return; }
        int want_close = strcasestr(c->in, "\nconnection: close") != NULL;
        if (strcasestr(c->in, "\ntransfer-encoding:")) { drop(c); return; } /* no proxy here sends it */
        char *path = strchr(c->in, ' ');
        if (!path) { drop(c); return; }
        if (!answer(c, path + 1, c->in + head, body, want_close)) return;
        c->in_len -= head + body;
        memmove(c->in, c->in + head + body, c->in_len);
    }
}

static void on_readable(struct conn *c) {
    if (c->in_len + 4096 > c->in_cap) {
        c->in_cap = c->in_cap ? c->in_cap * 2 : 16384;
        if (c->in_cap > MAX_REQUEST || !(c->in = realloc(c->in, c->in_cap))) { fprintf(stderr, "request too large\n"); exit(1); }
    }
    ssize_t got = recv(c->fd, c->in + c->in_len, c->in_cap - c->in_len - 1, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) { drop(c); return; }
    c->in_len += (size_t)got;
    c->in[c->in_len] = 0;
    c->active_ns = now_ns();
    take_requests(c);
}

static void on_accept(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (fd >= MAX_FD) { close(fd); continue; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        struct conn *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = fd;
        c->active_ns = now_ns();
        conns[fd] = c;
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &(struct epoll_event){.events = EPOLLIN | EPOLLRDHUP, .data.fd = fd});
    }
}

static void close_idle(uint64_t now) {
    for (int fd = 0; fd < MAX_FD; fd++)
        if (conns[fd] && !conns[fd]->chunks && now - conns[fd]->active_ns > IDLE_NS) drop(conns[fd]);
}

/* Send every event that is due, then set the timer to the next. */
static void send_due(void) {
    uint64_t next = 0;
    for (int i = n_streams - 1; i >= 0; i--) { /* downwards: an ended stream is replaced by the last */
        struct conn *c = streams[i];
        c->active_ns = now_ns();
        while (c->due_ns <= c->active_ns && send_event(c)) {}
    }
    for (int i = 0; i < n_streams; i++)
        if (!next || streams[i]->due_ns < next) next = streams[i]->due_ns;
    if (next == armed_ns) return;
    armed_ns = next;
    struct itimerspec at = {.it_value = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

static const char HELP[] =
    "----- common params -----\n\n"
    "-h,    --help, --usage                  print usage and exit\n"
    "--version                               show version and build info\n"
    "-t,    --threads N                      ignored\n"
    "-c,    --ctx-size N                     ignored\n"
    "-b,    --batch-size N                   ignored\n"
    "-ub,   --ubatch-size N                  ignored\n"
    "-dev,  --device <dev1,dev2,..>          ignored\n"
    "--list-devices                          print list of available devices and exit\n"
    "-ngl,  --gpu-layers, --n-gpu-layers N   ignored\n"
    "-m,    --model FNAME                    ignored\n\n"
    "----- example-specific params -----\n\n"
    "-np,   --parallel N                     ignored\n"
    "-a,    --alias STRING                   ignored\n"
    "--host HOST                             only 127.0.0.1\n"
    "--port PORT                             port to listen (default: 8080)\n"
    "--jinja, --no-jinja                     ignored\n"
    "--no-warmup                             ignored\n";

int main(int argc, char **argv) {
    int port = 8080;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--version")) { fprintf(stderr, "version: 1 (bench)\nbuilt with cc for Linux\n"); return 0; }
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) { fputs(HELP, stdout); return 0; }
        if (!strcmp(argv[i], "--list-devices")) { puts("Available devices:"); return 0; }
        if (!strcmp(argv[i], "--port") && i + 1 < argc) port = atoi(argv[++i]);
    }
    signal(SIGPIPE, SIG_IGN);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 512)) {
        fprintf(stderr, "E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: %d\n", port);
        return 1;
    }
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (epoll_fd < 0 || timer_fd < 0) die("epoll");
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &(struct epoll_event){.events = EPOLLIN, .data.fd = listener});
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &(struct epoll_event){.events = EPOLLIN, .data.fd = timer_fd});
    fprintf(stderr, "srv  llama_server: model loaded\nsrv  llama_server: listening on http://127.0.0.1:%d\n", port);

    uint64_t swept_ns = now_ns();
    while (!stopping) {
        struct epoll_event events[256];
        int n = epoll_wait(epoll_fd, events, 256, 1000);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) on_accept(listener);
            else if (fd == timer_fd) { uint64_t count; if (read(timer_fd, &count, sizeof count) < 0) continue; }
            else if (conns[fd]) on_readable(conns[fd]);
        }
        send_due();
        uint64_t now = now_ns();
        if (now - swept_ns > 500000000u) { close_idle(now); swept_ns = now; }
    }
    return 0;
}
