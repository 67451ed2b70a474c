// What the kernels draw at chosen places: random words of one counter, and dropout's factors from one index on.

#include "philox.cuh"
#include "vector.cuh"

struct PhiloxProbeParams {
  const lt::Words* counters;
  const lt::uint32* keys;  // two a counter
  lt::Words* words;
};

struct DropoutProbeParams {
  lt::Dropout dropout;
  const lt::uint64* indices;
  lt::Octet* factors;
};

extern "C" __global__ void philox_probe(const PhiloxProbeParams p) {
  p.words[blockIdx.x] = lt::philox4x32(p.counters[blockIdx.x], p.keys[2 * blockIdx.x], p.keys[2 * blockIdx.x + 1]);
}

extern "C" __global__ void dropout_probe(const DropoutProbeParams p) {
  p.factors[blockIdx.x] = lt::dropout_factors(p.dropout, lt::dropout_step(p.dropout), p.indices[blockIdx.x]);
}
