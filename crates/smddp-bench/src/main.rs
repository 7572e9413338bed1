//! The program `smddp-bench`.

fn main() {
    let spawn = std::env::current_exe()
        .map(|exe| vec![exe.to_string_lossy().into_owned()])
        .unwrap_or_else(|_| vec!["smddp-bench".into()]);
    let args: Result<Vec<String>, _> = std::env::args_os().skip(1).map(|word| word.into_string()).collect();
    std::process::exit(match args {
        Ok(args) => smddp_bench::main_from(args, &spawn),
        Err(word) => {
            eprintln!("smddp-bench: invalid argument {word:?}: expected UTF-8 text");
            2
        }
    });
}
