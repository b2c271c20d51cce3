//! Two tenants of one pool, each with its own limit, a tag with another limit, and a report by
//! owner.
#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use aquifer::{Budget, Bytes, MemoryError, Request, Runtime, Tag};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().or_sim().build()?;
    let s = rt.device(0)?.stream()?;

    // Live bytes of tenants have their own tree, since the pool pays for the memory itself.
    let tenants = Budget::new("all tenants", 10 << 20);
    let (a, b) = (tenants.child("tenant-a", 8 << 20), tenants.child("tenant-b", 4 << 20));

    let kv = Request::bytes(6 << 20).tag(Tag::named("kv"));
    let x = rt.device(0)?.for_tenant(&a)?.alloc(&s, kv)?;
    println!("tenant a holds {} under \"{}\"", Bytes(x.bytes()), x.tag());

    match rt.device(0)?.for_tenant(&b)?.alloc(&s, kv) {
        Err(MemoryError::OutOfMemory(refused)) => println!("{refused}"),
        other => return Err(format!("a limit of 4 MiB answered {other:?}").into()),
    }

    rt.device(0)?.limit_tag(Tag::named("kv"), 2 << 20);
    assert!(rt.device(0)?.alloc(&s, kv).is_err(), "whoever asks");
    drop(x);
    assert_eq!(a.used(), 0);
    Ok(())
}
