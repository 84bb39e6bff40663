// A fake CUDA device whose tensors have no numbers: what autograd asks of a device, and nothing else.
#include "guard.h"

extern "C" void install() { fake_gpu::install(); }
