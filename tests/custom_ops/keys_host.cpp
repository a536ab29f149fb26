// index_keys.cu as a function of the host; built by test_index_keys_cuda.py.
#include "tests/custom_ops/index_rows_host.h"
#include "custom_ops/index_keys.cu"

static Arguments arguments;

extern "C" bool keys_on_host(const Arguments* a, unsigned blocks, unsigned seed) {
    arguments = *a;
    return host::launch(blocks, THREADS, 1, 0, seed, [] { prepare_keys(arguments); });
}
