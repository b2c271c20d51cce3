//! Prints the public items of a crate from a JSON file of rustdoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).ok_or("usage: list FILE")?;
    let listed = public_api::Builder::from_rustdoc_json(file)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()?;
    for item in listed.items() {
        println!("{item}");
    }
    Ok(())
}
