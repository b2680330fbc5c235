// One step of Adam or AdamW on split main weights, with the bits of torch's fused kernel: see `GpuAdam` in fused_adam.py.
// The loop for processors is in `infinity.numerics.kernels`.
//
// Operations are named, so that a compiler has nothing to contract: where torch's code has a fused multiply-add, written
// or made by its compiler from a product that is added at once, there is one here, and nowhere else. Read in torch 2.13
// (ATen/native/cuda/fused_adam_utils.cuh); the trial at the start decides whether the torch that is installed agrees.
//
// A launch takes 32-bit integers, so hyperparameters come as the bits of a float. `step` and `scale` are read from device
// memory, so the host waits for neither. Joining and splitting the main weight: see `infinity.numerics.remainder`.
extern "C" __global__ void adam_on_split_weights(
    short* weight, short* remainder, const void* gradient, float* exp_avg, float* exp_avg_sq,
    const float* step, const float* scale, int has_scale, int is_bf16, int is_decoupled,
    int lr_bits, int beta1_bits, int beta2_bits, int decay_bits, int eps_bits, int numel)
{
    const float lr = __int_as_float(lr_bits), beta1 = __int_as_float(beta1_bits), beta2 = __int_as_float(beta2_bits);
    const float weight_decay = __int_as_float(decay_bits), eps = __int_as_float(eps_bits);
    const float step_size = __fdiv_rn(lr, __fsub_rn(1.0f, powf(beta1, *step)));
    const float root_correction = __fsqrt_rn(__fsub_rn(1.0f, powf(beta2, *step)));
    const float shrink = __fmul_rn(lr, weight_decay);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < numel; i += gridDim.x * blockDim.x) {
        float main = __int_as_float(((int)weight[i] << 16) + (int)remainder[i]);
        float slope = is_bf16 ? __int_as_float((int)((const short*)gradient)[i] << 16) : ((const float*)gradient)[i];
        if (has_scale) slope = __fmul_rn(slope, *scale);
        if (weight_decay != 0.0f) {
            if (is_decoupled) main = __fmaf_rn(-shrink, main, main);
            else slope = __fmaf_rn(main, weight_decay, slope);
        }
        const float average = __fmaf_rn(beta1, exp_avg[i], __fmaf_rn(-beta1, slope, slope));
        const float power = __fmul_rn(slope, slope);
        const float square = __fmaf_rn(beta2, exp_avg_sq[i], __fmaf_rn(-beta2, power, power));
        exp_avg[i] = average;
        exp_avg_sq[i] = square;
        const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(square), root_correction), eps);
        main = __fsub_rn(main, __fdiv_rn(__fmul_rn(step_size, average), root));
        const int bits = main != main ? 0x7fc00000 : __float_as_int(main);
        const int high = (bits + 0x8000) >> 16;
        weight[i] = (short)high;
        remainder[i] = (short)(bits - (high << 16));
    }
}
