//! Two tenants of one pool, each under a limit of its own, and who holds what by tag.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Budget, Bytes, Limit, Opaque, Request, Runtime, Tag};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let pool = rt.device(0)?;
    let s = pool.stream()?;

    let a = Limit::new(pool.clone(), Budget::new("tenant a", 8 << 20));
    let b = Limit::new(pool.clone(), Budget::new("tenant b", 4 << 20));

    let kv = Request::bytes(6 << 20).tag(Tag::named("kv"));
    let x = a.allocate(&s, kv)?;
    println!("tenant a holds {} under \"{}\"", Bytes(x.bytes()), x.tag());

    match b.allocate(&s, kv) {
        Ok(_) => return Err("a limit of 4 MiB granted 6".into()),
        Err(refused) => println!("tenant b: {refused}"),
    }
    drop(x);
    assert_eq!(a.budget().used(), 0);
    Ok(())
}
