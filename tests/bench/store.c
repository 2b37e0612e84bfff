/* An object store of the bench: serves a folder over HTTP as S3 does, with a fixed delay for each
 * request, and a bandwidth that all connections share.
 *
 *     store FOLDER DELAY_US BYTES_PER_S
 *
 * It prints its port on loopback and serves until its standard input ends. `/BUCKET/KEY` is the file
 * FOLDER/BUCKET/KEY. Reads are answered: GET and HEAD of an object, with or without a range of bytes,
 * and lists of all objects below a prefix that ends with a slash; signatures are not looked at. Keys
 * are taken to need no escapes in XML. The delay runs from the arrival of a request to the first byte
 * of the answer. GET `/counts` gives, as JSON and without delay, the numbers of requests and of bytes
 * of objects since the start.
 *
 * Each connection has a thread, since a thread of C that sleeps costs nothing.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HEAD_BYTES 16384
#define PIECE_BYTES 65536
#define CREDIT_NS 2000000 /* an idle link may be this much behind, so that late wake-ups lose nothing */
#define STACK_BYTES 131072
#define SECOND_NS 1000000000ull

static const char *root;
static uint64_t delay_ns, bytes_per_s;
static pthread_mutex_t link_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t link_free_ns; /* when the link has sent all that it was given */
static _Atomic uint64_t requests, sent_bytes;

static uint64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (uint64_t)at.tv_sec * SECOND_NS + (uint64_t)at.tv_nsec;
}

static void sleep_until(uint64_t at_ns) {
    struct timespec at = {.tv_sec = (time_t)(at_ns / SECOND_NS), .tv_nsec = (long)(at_ns % SECOND_NS)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {}
}

/* Waits until the link, which all connections share, has sent so many bytes more. */
static void use_link(uint64_t bytes) {
    uint64_t earliest = now_ns() - CREDIT_NS;
    pthread_mutex_lock(&link_lock);
    if (link_free_ns < earliest) link_free_ns = earliest;
    link_free_ns += bytes * SECOND_NS / bytes_per_s;
    uint64_t until = link_free_ns;
    pthread_mutex_unlock(&link_lock);
    sleep_until(until);
}

static bool send_all(int to, const char *data, size_t size, int flags) {
    while (size) {
        ssize_t sent = send(to, data, size, flags | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        data += sent;
        size -= (size_t)sent;
    }
    return true;
}

static bool send_text(int to, int status, const char *reason, const char *body, bool has_body) {
    char answer[1024];
    int size = snprintf(answer, sizeof answer,
                        "HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %zu\r\n\r\n%s",
                        status, reason, strlen(body), has_body ? body : "");
    return send_all(to, answer, (size_t)size, 0);
}

/* The bytes `first` to `end - 1` of a file, at the rate of the link. */
static bool send_bytes(int to, int file, off_t first, off_t end) {
    while (first < end) {
        size_t piece = end - first < PIECE_BYTES ? (size_t)(end - first) : PIECE_BYTES;
        use_link(piece);
        while (piece) {
            ssize_t sent = sendfile(to, file, &first, piece);
            if (sent < 0 && errno == EINTR) continue;
            if (sent <= 0) return false;
            piece -= (size_t)sent;
            atomic_fetch_add(&sent_bytes, (uint64_t)sent);
        }
    }
    return true;
}

/* The value of a header of a request, whose lines end with \r\n; NULL where it is not there. */
static const char *header(const char *head, const char *name) {
    size_t size = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line && line[2]; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, size) && line[2 + size] == ':')
            return line + 3 + size + strspn(line + 3 + size, " ");
    return NULL;
}

/* Decodes %XX in place. False for what cannot be the path of a file below the folder. */
static bool decode(char *path) {
    char *to = path;
    for (char *from = path; *from; from++) {
        unsigned value;
        if (*from == '%') {
            if (sscanf(from + 1, "%2x", &value) != 1 || !value) return false;
            *to++ = (char)value;
            from += 2;
        } else
            *to++ = *from;
    }
    *to = 0;
    return path[0] == '/' && !strstr(path, "/../");
}

/* The part of `size` bytes that a range asks for. False where it asks for nothing that there is. */
static bool range_of(const char *range, off_t size, off_t *first, off_t *end) {
    long long from, to;
    if (sscanf(range, "bytes=-%lld", &to) == 1 && range[6] == '-') {
        *first = to < size ? size - to : 0;
    } else {
        int found = sscanf(range, "bytes=%lld-%lld", &from, &to);
        if (found < 1) return false;
        *first = from;
        if (found == 2 && to < size - 1) *end = to + 1;
    }
    return *first < *end;
}

static void time_text(time_t modified, const char *format, char *text, size_t room) {
    struct tm at;
    gmtime_r(&modified, &at);
    strftime(text, room, format, &at);
}

static bool answer_file(int to, char *path, const char *range, bool has_body) {
    char full[4096];
    struct stat found;
    if (!decode(path)) return send_text(to, 400, "Bad Request", "", has_body);
    snprintf(full, sizeof full, "%s%s", root, path);
    int file = open(full, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &found) < 0 || !S_ISREG(found.st_mode)) {
        if (file >= 0) close(file);
        return send_text(to, 404, "Not Found",
                         "<Error><Code>NoSuchKey</Code><Message>no such object</Message></Error>",
                         has_body);
    }
    off_t first = 0, end = found.st_size;
    if (range && !range_of(range, found.st_size, &first, &end)) {
        close(file);
        return send_text(to, 416, "Range Not Satisfiable",
                         "<Error><Code>InvalidRange</Code><Message>no such range</Message></Error>",
                         has_body);
    }
    char part[96] = "", modified[64], head[512];
    time_text(found.st_mtime, "%a, %d %b %Y %H:%M:%S GMT", modified, sizeof modified);
    if (range)
        snprintf(part, sizeof part, "Content-Range: bytes %jd-%jd/%jd\r\n", (intmax_t)first,
                 (intmax_t)end - 1, (intmax_t)found.st_size);
    int size = snprintf(head, sizeof head,
                        "HTTP/1.1 %s\r\nContent-Type: application/octet-stream\r\n"
                        "Accept-Ranges: bytes\r\nLast-Modified: %s\r\nETag: \"%jx-%jx\"\r\n%s"
                        "Content-Length: %jd\r\n\r\n",
                        range ? "206 Partial Content" : "200 OK", modified,
                        (intmax_t)found.st_mtime, (intmax_t)found.st_size, part,
                        (intmax_t)(end - first));
    bool is_sent = send_all(to, head, (size_t)size, has_body ? MSG_MORE : 0) &&
                   (!has_body || send_bytes(to, file, first, end));
    close(file);
    return is_sent;
}

static int is_shown(const struct dirent *entry) {
    return strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..");
}

/* Writes the entries of a list for all files below a folder; `key` begins the keys of its files. */
static void list_folder(FILE *out, const char *folder, const char *key, size_t *count) {
    struct dirent **found;
    int entries = scandir(folder, &found, is_shown, alphasort);
    for (int at = 0; at < entries; at++) {
        char path[4096], name[4096], modified[64];
        struct stat stated;
        snprintf(path, sizeof path, "%s/%s", folder, found[at]->d_name);
        snprintf(name, sizeof name, "%s%s", key, found[at]->d_name);
        free(found[at]);
        if (stat(path, &stated) < 0) continue;
        if (S_ISDIR(stated.st_mode)) {
            strncat(name, "/", sizeof name - strlen(name) - 1);
            list_folder(out, path, name, count);
            continue;
        }
        time_text(stated.st_mtime, "%Y-%m-%dT%H:%M:%S.000Z", modified, sizeof modified);
        fprintf(out,
                "<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>\"%jx-%jx\"</ETag>"
                "<Size>%jd</Size></Contents>",
                name, modified, (intmax_t)stated.st_mtime, (intmax_t)stated.st_size,
                (intmax_t)stated.st_size);
        *count += 1;
    }
    if (entries >= 0) free(found);
}

/* The list that the query of a path asks for: all objects, on one page. */
static bool answer_list(int to, char *path, char *query) {
    char *body, *text, prefix[2048] = "", folder[4096];
    size_t size, count = 0;
    for (char *word = query, *next; word; word = next) {
        if ((next = strchr(word, '&'))) *next++ = 0;
        if (!strncmp(word, "prefix=", 7)) {
            snprintf(prefix, sizeof prefix, "/%s", word + 7);
            if (!decode(prefix)) return send_text(to, 400, "Bad Request", "", true);
        }
    }
    FILE *out = open_memstream(&body, &size);
    if (!out) return false;
    snprintf(folder, sizeof folder, "%s%s%s", root, path, prefix);
    list_folder(out, folder, prefix + (*prefix == '/'), &count);
    fclose(out);
    if (asprintf(&text,
                 "<ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>%zu</KeyCount>%s"
                 "</ListBucketResult>",
                 count, body) < 0)
        return false;
    free(body);
    char head[256];
    int bytes = snprintf(head, sizeof head,
                         "HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\n"
                         "Content-Length: %zu\r\n\r\n",
                         strlen(text));
    bool is_sent = send_all(to, head, (size_t)bytes, MSG_MORE) && send_all(to, text, strlen(text), 0);
    free(text);
    return is_sent;
}

static bool answer(int to, char *head, uint64_t arrived_ns) {
    char method[8], path[3072], text[128];
    if (sscanf(head, "%7s %3071s", method, path) != 2) return false;
    bool has_body = !strcmp(method, "GET");
    if (!strcmp(path, "/counts")) {
        snprintf(text, sizeof text, "{\"requests\": %" PRIu64 ", \"bytes\": %" PRIu64 "}",
                 atomic_load(&requests), atomic_load(&sent_bytes));
        return send_text(to, 200, "OK", text, true);
    }
    atomic_fetch_add(&requests, 1);
    sleep_until(arrived_ns + delay_ns);
    if (!has_body && strcmp(method, "HEAD")) /* its body would be taken for the next request */
        return send_text(to, 501, "Not Implemented", "", true) && false;
    char *query = strchr(path, '?');
    if (query) *query++ = 0;
    if (query && has_body && strstr(query, "list-type=2")) return answer_list(to, path, query);
    return answer_file(to, path, header(head, "Range"), has_body);
}

static void *serve(void *given) {
    int client = (int)(intptr_t)given, on = 1;
    char *head = malloc(HEAD_BYTES + 1);
    size_t size = 0;
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    while (head && size < HEAD_BYTES) {
        ssize_t got = recv(client, head + size, HEAD_BYTES - size, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        uint64_t arrived_ns = now_ns();
        size += (size_t)got;
        head[size] = 0;
        char *end;
        bool is_open = true;
        while (is_open && (end = strstr(head, "\r\n\r\n"))) {
            end[2] = 0;
            is_open = answer(client, head, arrived_ns);
            size -= (size_t)(end + 4 - head);
            memmove(head, end + 4, size + 1);
        }
        if (!is_open) break;
    }
    free(head);
    close(client);
    return NULL;
}

static void *accept_all(void *given) {
    int listener = (int)(intptr_t)given;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (;;) {
        pthread_t thread;
        int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client < 0 && errno != EINTR && errno != ECONNABORTED) break;
        if (client >= 0 && pthread_create(&thread, &attributes, serve, (void *)(intptr_t)client))
            close(client);
    }
    perror("store: accept");
    exit(1);
}

int main(int count, char **words) {
    if (count != 5) {
        fprintf(stderr, "usage: store FOLDER DELAY_US BYTES_PER_S ADDRESS\n");
        return 2;
    }
    root = words[1];
    delay_ns = strtoull(words[2], NULL, 10) * 1000;
    bytes_per_s = strtoull(words[3], NULL, 10);
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1000); /* the delay shall be what it says */
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(words[4])};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) < 0 ||
        listen(listener, 1024) < 0 || getsockname(listener, (struct sockaddr *)&address, &size) < 0) {
        perror("store: listen");
        return 1;
    }
    pthread_t accepting;
    if (pthread_create(&accepting, NULL, accept_all, (void *)(intptr_t)listener)) {
        perror("store: thread");
        return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) {}
    return 0;
}
