// SPDX-License-Identifier: Apache-2.0
// The kernels: a launch is one rank (its parameters by value, as production and CUDA graphs need
// them) or, in tests, a whole world of ranks that share one GPU.
#ifndef JAX_ULYSSES_GEMM_KERNELS_H_
#define JAX_ULYSSES_GEMM_KERNELS_H_

#include "jax_ulysses/gemm/a2a_gemm.h"
#include "jax_ulysses/gemm/gemm_a2a.h"

namespace jax_ulysses {

template <class C>
JU_D void RunRank(const A2aGemmParams<C>& params, const RankCall& call, const PushArgs& args,
                  int32_t cta, char* shared) {
  A2aGemmRank<C>(params, call, args, cta, shared);
}
template <class C>
JU_D void RunRank(const GemmA2aParams<C>& params, const RankCall& call, const PullArgs& args,
                  int32_t cta, char* shared) {
  GemmA2aRank<C>(params, call, args, cta, shared);
}

template <class Params>
__global__ void __cluster_dims__(Params::Config::kCluster, 1, 1)
    __launch_bounds__(Params::Config::kThreads, 1)
        RankKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared[];
  RunRank(params, params.call, params.args, static_cast<int32_t>(blockIdx.x), shared);
}

// CTAs [r * ctas, (r+1) * ctas) are rank r; `ranks` lies in device memory.
template <class Params>
__global__ void __cluster_dims__(Params::Config::kCluster, 1, 1)
    __launch_bounds__(Params::Config::kThreads, 1) WorldKernel(const Params* ranks, int32_t ctas) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ SharedCopy<RankCall> call;
  __shared__ SharedCopy<decltype(Params::args)> args;
  const int32_t rank = static_cast<int32_t>(blockIdx.x) / ctas;
  call.Fill(ranks[rank].call);
  args.Fill(ranks[rank].args);
  __syncthreads();
  RunRank(ranks[rank], call.get(), args.get(), static_cast<int32_t>(blockIdx.x) - rank * ctas,
          shared);
}

}  // namespace jax_ulysses

#endif  // JAX_ULYSSES_GEMM_KERNELS_H_
