//! Prints where the fake driver lies, for scripts: `SMDDP_CUDA_LIBRARY=$(cargo run -q -p fake-libcuda)`.

fn main() {
    println!("{}", fake_libcuda::PATH);
}
