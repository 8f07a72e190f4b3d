/* Two ranks that send a message there and back, or any number that sum up one, with MPI; as crates/comm/examples/ping.rs does.
 *
 *     mpicc -O2 -o mpi_local mpi_local.c && mpirun -n 2 ./mpi_local BYTES ROUNDS [all-reduce]
 *
 * Every rank prints a JSON line: the median time of a round (of half a round, for there and back), and the processor time of one. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double processor_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void round_of(int rank, int sum, float *data, float *result, int count) {
    if (sum) {
        MPI_Allreduce(data, result, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    } else if (rank == 0) {
        MPI_Send(data, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(data, count, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        MPI_Recv(data, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(data, count, MPI_FLOAT, 0, 0, MPI_COMM_WORLD);
    }
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    long bytes = atol(argv[1]), rounds = atol(argv[2]);
    int rank, sum = argc > 3 && strcmp(argv[3], "all-reduce") == 0, count = (int)(bytes / 4);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    float *data = calloc(count + 1, 4), *result = calloc(count + 1, 4);
    double *seconds = malloc(rounds * sizeof(double));
    for (long i = 0; i < (rounds < 20 ? rounds : 20); i++) round_of(rank, sum, data, result, count);
    double before = processor_s();
    for (long i = 0; i < rounds; i++) {
        double start = MPI_Wtime();
        round_of(rank, sum, data, result, count);
        seconds[i] = (MPI_Wtime() - start) / (sum ? 1 : 2);
    }
    double processor = (processor_s() - before) / rounds;
    qsort(seconds, rounds, sizeof(double), by_value);
    char line[200];
    int len = snprintf(line, sizeof line, "[%d] {\"bytes\":%ld,\"median_s\":%e,\"least_s\":%e,\"processor_s\":%e}\n", rank,
                       bytes, seconds[rounds / 2], seconds[0], processor);
    fwrite(line, 1, len, stdout);
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
