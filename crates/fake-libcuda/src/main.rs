//! Prints the path of the fake driver, for scripts: `SMDDP_CUDA_LIBRARY=$(cargo run -q -p fake-libcuda)`.

fn main() {
    println!("{}", fake_libcuda::PATH);
}
