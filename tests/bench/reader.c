/* Reads files as a training job does: open, fstat, read to the end, close, one after the other.
 *
 *     reader LIST        LIST holds NUL-terminated paths
 *
 * Prints as JSON how many files and bytes, the bytes added as 64-bit words (modulo 2^64), and the
 * seconds from the first open to the last close. Any failure ends it with the path on stderr.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *path) {
    fprintf(stderr, "reader: %s: %s\n", path, strerror(errno));
    exit(1);
}

/* The whole file at `path`, in a buffer that is kept; its end is padded with zeros to 8 bytes. */
static size_t read_file(const char *path, char **buffer, size_t *room) {
    struct stat found;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &found) < 0) fail(path);
    size_t size = (size_t)found.st_size;
    if (size + 8 > *room) {
        *room = size + 8;
        free(*buffer);
        if (!(*buffer = malloc(*room))) fail(path);
    }
    size_t filled = 0;
    while (filled < size) {
        ssize_t count = read(file, *buffer + filled, size - filled);
        if (count < 0) fail(path);
        if (count == 0) {
            errno = ENODATA; /* shorter than it says */
            fail(path);
        }
        filled += (size_t)count;
    }
    memset(*buffer + size, 0, 8);
    if (close(file) < 0) fail(path);
    return size;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: reader LIST\n");
        return 2;
    }
    char *list = NULL, *content = NULL;
    size_t list_room = 0, content_room = 0;
    size_t list_bytes = read_file(argv[1], &list, &list_room);

    struct timespec start, end;
    uint64_t files = 0, bytes = 0, sum = 0;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (const char *path = list; path < list + list_bytes; path += strlen(path) + 1) {
        size_t size = read_file(path, &content, &content_room);
        for (size_t at = 0; at < size; at += 8) {
            uint64_t word;
            memcpy(&word, content + at, 8);
            sum += word;
        }
        files++;
        bytes += size;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds =
        (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;
    printf("{\"files\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"sum\": %" PRIu64
           ", \"seconds\": %.6f}\n",
           files, bytes, sum, seconds);
    return 0;
}
