// index_queries.cu as a function of the host; built by test_index_queries_cuda.py.
#include "tests/custom_ops/index_rows_host.h"
#include "custom_ops/index_queries.cu"

static Arguments arguments;

extern "C" bool queries_on_host(const Arguments* a, unsigned blocks, unsigned seed) {
    arguments = *a;
    return host::launch(blocks, THREADS, 1, 0, seed, [] { prepare_queries(arguments); });
}
