// topk.cu as a function of the host; built by test_topk_cuda.py with the macros of a Tuning.
#include "tests/custom_ops/cuda_host.h"
#include "custom_ops/topk.cu"

static Arguments arguments;

extern "C" bool topk_on_host(const Arguments* a, unsigned rows, unsigned blocks_of_a_row, unsigned seed) {
    arguments = *a;
    return host::launch(rows * blocks_of_a_row, THREADS, blocks_of_a_row, sizeof(Shared), seed,
                        [] { topk_rows(arguments); });
}

extern "C" bool reaches(float threshold, float x) {
    const float4 one[1] = {{x, x, x, x}};
    return elements_above(one, float_below(order_key(__float_as_uint(threshold)))) == 15;
}

extern "C" int shared_bytes() { return sizeof(Shared); }
