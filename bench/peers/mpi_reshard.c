/* One rank of a reshard with MPI, as a framework does it today.

       mpirun ... mpi_reshard BOXES METHOD REPEAT

   BOXES has a line for every box: its bytes, its holder, then its receivers. METHOD is `sendrecv`: every receiver gets
   every box from its holder, all posted at once (Isend, Irecv); or `broadcast`: an Ibcast per box, from its holder to its
   receivers, all started at once. Boxes lie packed in memory on both sides. Rank 0 prints a JSON line. */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_MEMBERS 256
#define MAX_BOXES 65536

typedef struct {
    int bytes, holder, num_members, members[MAX_MEMBERS]; /* the holder is the first member */
    unsigned char *data;                                  /* where this rank holds or receives it */
    MPI_Comm comm;
    int root;
} Box;

static int rank, num_boxes;
static Box *boxes;

static void fail(const char *why) {
    fprintf(stderr, "mpi_reshard: %s\n", why);
    MPI_Abort(MPI_COMM_WORLD, 2);
}

static int is_member(const Box *box) {
    for (int i = 0; i < box->num_members; i++)
        if (box->members[i] == rank) return 1;
    return 0;
}

static void read_boxes(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) fail("cannot read the boxes");
    boxes = calloc(MAX_BOXES, sizeof(Box));
    char line[8192];
    while (fgets(line, sizeof line, file)) {
        if (num_boxes == MAX_BOXES) fail("too many boxes");
        Box *box = &boxes[num_boxes++];
        char *word = strtok(line, " \n");
        box->bytes = atoi(word);
        while ((word = strtok(NULL, " \n"))) box->members[box->num_members++] = atoi(word);
        box->holder = box->members[0];
        if (is_member(box) && !(box->data = malloc(box->bytes))) fail("out of memory");
    }
    fclose(file);
}

/* A communicator for every set of members; every rank makes those it belongs to, in the same order. */
static void make_groups(void) {
    MPI_Group world;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    for (int b = 0; b < num_boxes; b++) {
        Box *box = &boxes[b];
        if (!box->data) continue;
        for (int a = 0; a < b && box->comm == 0; a++)
            if (boxes[a].num_members == box->num_members &&
                !memcmp(boxes[a].members, box->members, box->num_members * sizeof(int)))
                box->comm = boxes[a].comm;
        if (box->comm == 0) {
            MPI_Group group;
            MPI_Group_incl(world, box->num_members, box->members, &group);
            MPI_Comm_create_group(MPI_COMM_WORLD, group, b, &box->comm);
            MPI_Group_free(&group);
        }
        box->root = 0;
    }
}

static int post_sendrecv(MPI_Request *requests) {
    int n = 0;
    for (int b = 0; b < num_boxes; b++) {
        Box *box = &boxes[b];
        if (!box->data) continue;
        if (rank != box->holder)
            MPI_Irecv(box->data, box->bytes, MPI_BYTE, box->holder, b, MPI_COMM_WORLD, &requests[n++]);
        else
            for (int i = 1; i < box->num_members; i++)
                MPI_Isend(box->data, box->bytes, MPI_BYTE, box->members[i], b, MPI_COMM_WORLD, &requests[n++]);
    }
    return n;
}

static int post_broadcast(MPI_Request *requests) {
    int n = 0;
    for (int b = 0; b < num_boxes; b++)
        if (boxes[b].data)
            MPI_Ibcast(boxes[b].data, boxes[b].bytes, MPI_BYTE, 0, boxes[b].comm, &requests[n++]);
    return n;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (argc != 4) fail("BOXES METHOD REPEAT");
    read_boxes(argv[1]);
    int broadcast = !strcmp(argv[2], "broadcast"), repeat = atoi(argv[3]), members = 0;
    for (int b = 0; b < num_boxes; b++) members += boxes[b].num_members;
    MPI_Request *requests = calloc(members + 1, sizeof(MPI_Request));
    if (broadcast) make_groups();
    if (rank == 0) printf("{\"method\": \"%s\", \"measured_s\": [", argv[2]);
    for (int turn = 0; turn < repeat; turn++) {
        for (int b = 0; b < num_boxes; b++)
            if (boxes[b].data)
                memset(boxes[b].data, rank == boxes[b].holder ? (b * 7 + turn) % 251 : 255, boxes[b].bytes);
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        int n = broadcast ? post_broadcast(requests) : post_sendrecv(requests);
        MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
        double end = MPI_Wtime(), first, last;
        for (int b = 0; b < num_boxes; b++) {
            Box *box = &boxes[b];
            int expected = (b * 7 + turn) % 251;
            if (box->data && (box->data[0] != expected || box->data[box->bytes - 1] != expected)) fail("a wrong box");
        }
        /* One machine, one clock. */
        MPI_Reduce(&start, &first, 1, MPI_DOUBLE, MPI_MIN, 0, MPI_COMM_WORLD);
        MPI_Reduce(&end, &last, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank == 0) printf("%s%.6f", turn ? ", " : "", last - first);
    }
    if (rank == 0) printf("]}\n");
    MPI_Finalize();
    return 0;
}
