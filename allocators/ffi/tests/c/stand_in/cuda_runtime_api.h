/* The name of CUDA's runtime API that aquifer.hpp needs, for machines without CUDA. */
#ifndef STAND_IN_CUDA_RUNTIME_API_H
#define STAND_IN_CUDA_RUNTIME_API_H

typedef struct CUstream_st *cudaStream_t;

#endif
