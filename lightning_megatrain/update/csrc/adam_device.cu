/* One step of AdamW or Adam on a split master in device memory: adam_split_reference of reference.py, bit for bit.
 *
 * Each line of arithmetic is one IEEE fp32 operation, and the compiler is told to keep it so (no contraction, exact
 * division and square root, subnormals kept; device.py has the flags). Elements are independent, so the launch's shape
 * cannot show. Scalars come as the bit patterns of floats.
 */
extern "C" __global__ void adam_split(
    unsigned short *high, short *low, float *exp_avg, float *exp_avg_sq, const unsigned short *grad, int numel,
    int grad_factor, int decay, int l2, int lerp_weight, int beta2, int grad_sq_weight, int bias2_sqrt, int eps,
    int step_size, int coupled, int lerp_from_grad)
{
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < numel;
         i += (long long)gridDim.x * blockDim.x) {
        /* The halves of the master are `low` and `high - (low < 0)`. Under a zero there is no negative remainder. */
        int rest = low[i];
        if ((high[i] & 0x7fff) == 0 && rest < 0)
            rest = 0;
        unsigned int bits = ((unsigned int)high[i] << 16) + (unsigned int)rest;
        float p = __uint_as_float(bits);

        float m = exp_avg[i];
        float v = exp_avg_sq[i];
        float g = __uint_as_float((unsigned int)grad[i] << 16) * __int_as_float(grad_factor);
        if (coupled)
            g = g + p * __int_as_float(l2);
        p = p * __int_as_float(decay);
        float d = (g - m) * __int_as_float(lerp_weight);
        m = (lerp_from_grad ? g : m) + d;
        v = v * __int_as_float(beta2);
        v = v + (g * __int_as_float(grad_sq_weight)) * g;
        float denom = sqrtf(v) / __int_as_float(bias2_sqrt) + __int_as_float(eps);
        p = p + (m * __int_as_float(step_size)) / denom;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;

        bits = __float_as_uint(p);
        rest = (short)(bits & 0xffffu);
        unsigned short upper = (unsigned short)((bits - (unsigned int)rest) >> 16);
        if ((bits & 0x7fffffffu) > 0x7f800000u && (upper & 0x7fffu) <= 0x7f80u) { /* a NaN that rounding would hide */
            upper = (unsigned short)(bits >> 16 | 0x0040u);
            rest = 0;
        }
        high[i] = upper;
        low[i] = (short)rest;
    }
}
