/* What upstream.c and load.c agree on: the bodies, so that one writes them and the other checks them.
 *
 * A request says what it wants in the text of its message, not in fields of its own, since a proxy
 * may drop fields that it does not know:
 *
 *     bench chunks=50 interval_us=10000     a stream of 50 events, one every 10 ms
 *     bench chunks=0 interval_us=0          one JSON reply, not streamed
 */
#ifndef BENCH_RELAY_WIRE_H
#define BENCH_RELAY_WIRE_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { EVENT_BYTES = 200, REPLY_BYTES = 1024, REQUEST_BYTES = 600 };

#define DONE_EVENT "data: [DONE]\n\n"

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Fill `out` between a head and a tail with x, so that the whole has exactly `size` bytes. */
static inline void pad_between(char *out, size_t size, const char *head, const char *tail) {
    size_t head_len = strlen(head), tail_len = strlen(tail);
    memset(out, 'x', size);
    memcpy(out, head, head_len);
    memcpy(out + size - tail_len, tail, tail_len);
}

#define EVENT_HEAD "data: {\"choices\":[{\"finish_reason\":null,\"index\":0,\"delta\":{\"content\":\""
#define EVENT_TAIL "\"}}],\"id\":\"chatcmpl-bench\",\"model\":\"bench\",\"object\":\"chat.completion.chunk\"}\n\n"
enum { NUMBER_AT = sizeof(EVENT_HEAD) - 1, STAMP_AT = NUMBER_AT + 9, STAMP_DIGITS = 20 };

/* Write event `number` of a stream, with the moment at which it is sent. */
static inline void format_event(char out[EVENT_BYTES], unsigned number, uint64_t sent_ns) {
    char head[160];
    snprintf(head, sizeof head, EVENT_HEAD "%08u %020llu ", number, (unsigned long long)sent_ns);
    pad_between(out, EVENT_BYTES, head, EVENT_TAIL);
}

/* Write the one reply that is not streamed. */
static inline void format_reply(char out[REPLY_BYTES]) {
    pad_between(out, REPLY_BYTES,
                "{\"choices\":[{\"finish_reason\":\"stop\",\"index\":0,\"message\":"
                "{\"role\":\"assistant\",\"content\":\"",
                "\"}}],\"created\":1700000000,\"model\":\"bench\",\"system_fingerprint\":\"b1\","
                "\"object\":\"chat.completion\",\"usage\":{\"completion_tokens\":64,"
                "\"prompt_tokens\":100,\"total_tokens\":164},\"id\":\"chatcmpl-bench\","
                "\"timings\":{\"cache_n\":0,\"prompt_n\":100,\"prompt_ms\":10.0,"
                "\"predicted_n\":64,\"predicted_ms\":640.0}}");
}

/* Write a request body for the scenario. */
static inline void format_request(char out[REQUEST_BYTES], unsigned chunks, unsigned interval_us) {
    char head[200];
    snprintf(head, sizeof head,
             "{\"model\":\"bench\",\"max_tokens\":64,\"temperature\":0,\"stream\":%s,\"messages\":"
             "[{\"role\":\"user\",\"content\":\"bench chunks=%u interval_us=%u ",
             chunks ? "true" : "false", chunks, interval_us);
    pad_between(out, REQUEST_BYTES, head, "\"}]}");
}

#endif
