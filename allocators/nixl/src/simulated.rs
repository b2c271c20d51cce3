//! A simulated NIXL within one thread, for tests: its calls succeed, or fail as the test says, and
//! each value that it makes is counted.
#![expect(unsafe_code, reason = "plays a library of C")]
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "fails a test")]

use crate::{
    Nixl,
    library::{AgentConfig, Api, Handle, IN_PROGRESS},
};
use nix::libc::malloc;
use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{CStr, CString, c_char, c_int, c_void},
    fmt,
    sync::Arc,
};

/// A range as NIXL knows it: kind, address, bytes, device.
pub type Known = (c_int, usize, usize, u64);

/// What this thread's NIXL has.
///
/// ```
/// use aquifer_nixl::{NixlAgent, simulated};
/// let agent = NixlAgent::new(&simulated::nixl(), "first")?;
/// simulated::world(|world: &mut simulated::World| world.fails = Some("create_backend"));
/// assert!(agent.add_backend("UCX", &[]).is_err());
/// drop(agent);
/// assert_eq!(simulated::world(|world| world.live), 0);
/// # Ok::<(), aquifer_nixl::NixlError>(())
/// ```
#[derive(Default)]
pub struct World {
    /// The registered ranges of each agent.
    pub registered: HashMap<String, Vec<Known>>,
    /// Messages that an agent has not asked for: the sender, the receiver, the bytes.
    messages: Vec<(String, String, Vec<u8>)>,
    /// Values that were made and not freed.
    pub live: i64,
    /// The calls so far.
    pub calls: Vec<&'static str>,
    /// The call that fails.
    pub fails: Option<&'static str>,
    /// Whether transfers stay in progress.
    pub is_slow: bool,
    /// Whether a transfer in progress can be aborted.
    pub aborts: bool,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("live", &self.live).finish_non_exhaustive()
    }
}

thread_local! {
    static WORLD: RefCell<World> = RefCell::default();
}

/// Changes or reads this thread's NIXL, as the example of [`World`] does.
pub fn world<T>(work: impl FnOnce(&mut World) -> T) -> T {
    WORLD.with_borrow_mut(work)
}

/// A value of NIXL's.
enum Value {
    Agent(String),
    Other,
    Ranges(c_int, Vec<Known>),
    Options(Vec<u8>, bool),
    Request {
        way: c_int,
        ours: Vec<Known>,
        theirs: Vec<Known>,
        from: String,
        to: String,
        released: bool,
    },
    Map(Vec<(CString, Vec<u8>)>),
}

/// Notes a call. Returns its status.
fn call(name: &'static str) -> c_int {
    world(|world| {
        world.calls.push(name);
        if world.fails == Some(name) { -2 } else { 0 }
    })
}

fn make(name: &'static str, place: *mut Handle, value: Value) -> c_int {
    let status = call(name);
    if status == 0 {
        world(|world| world.live += 1);
        // SAFETY: 1. the caller's place is valid for the write.
        unsafe { *place = Box::into_raw(Box::new(value)).cast() };
    }
    status
}

fn destroy(name: &'static str, handle: Handle) -> c_int {
    let status = call(name);
    world(|world| world.live -= 1);
    // SAFETY: 1. `make` has made it, and its owner frees it once.
    drop(unsafe { Box::from_raw(handle.cast::<Value>()) });
    status
}

fn of<'a>(handle: Handle) -> &'a mut Value {
    // SAFETY: 1. `make` has made it. 2. one thread uses it, within one call.
    unsafe { &mut *handle.cast::<Value>() }
}

fn text_of(text: *const c_char) -> String {
    // SAFETY: 1. the caller's text ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

fn agent_of(handle: Handle) -> String {
    let Value::Agent(name) = of(handle) else { panic!("no agent") };
    name.clone()
}

fn ranges_of(handle: Handle) -> Vec<Known> {
    let Value::Ranges(_, ranges) = of(handle) else { panic!("no list") };
    ranges.clone()
}

/// Copies bytes to memory that the C library's `free` frees.
fn leaked(bytes: &[u8]) -> *mut c_void {
    // SAFETY: 1. the memory has as many bytes.
    unsafe {
        let copy = malloc(bytes.len().max(1));
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy.cast(), bytes.len());
        copy
    }
}

macro_rules! destroys {
    ($($name:ident)+) => {$(
        unsafe extern "C" fn $name(handle: Handle) -> c_int {
            destroy(stringify!($name), handle)
        }
    )+};
}

destroys! {
    destroy_params destroy_backend destroy_reg_dlist destroy_xfer_dlist destroy_opt_args
    destroy_notif_map
}

macro_rules! makes {
    ($($name:ident $value:expr;)+) => {$(
        unsafe extern "C" fn $name(place: *mut Handle) -> c_int {
            make(stringify!($name), place, $value)
        }
    )+};
}

makes! {
    create_params Value::Other;
    create_opt_args Value::Options(Vec::new(), false);
    create_notif_map Value::Map(Vec::new());
}

macro_rules! lists {
    ($($name:ident)+) => {$(
        unsafe extern "C" fn $name(kind: c_int, place: *mut Handle) -> c_int {
            make(stringify!($name), place, Value::Ranges(kind, Vec::new()))
        }
    )+};
}

lists! { create_reg_dlist create_xfer_dlist }

fn add(name: &'static str, list: Handle, address: usize, bytes: usize, device: u64) -> c_int {
    let Value::Ranges(kind, ranges) = of(list) else { panic!("no list") };
    ranges.push((*kind, address, bytes, device));
    call(name)
}

unsafe extern "C" fn reg_dlist_add_desc(
    list: Handle,
    address: usize,
    bytes: usize,
    device: u64,
    _: *const c_void,
    _: usize,
) -> c_int {
    add("reg_dlist_add_desc", list, address, bytes, device)
}

unsafe extern "C" fn xfer_dlist_add_desc(
    list: Handle,
    address: usize,
    bytes: usize,
    device: u64,
) -> c_int {
    add("xfer_dlist_add_desc", list, address, bytes, device)
}

unsafe extern "C" fn create_configured_agent(
    name: *const c_char,
    config: *const AgentConfig,
    place: *mut Handle,
) -> c_int {
    // SAFETY: 1. the caller's settings are live.
    assert_eq!(unsafe { (*config).thread_sync }, 1, "several threads use an agent");
    let name = text_of(name);
    world(|world| world.registered.insert(name.clone(), Vec::new()));
    make("create_configured_agent", place, Value::Agent(name))
}

unsafe extern "C" fn destroy_agent(handle: Handle) -> c_int {
    let name = agent_of(handle);
    world(|world| {
        world.registered.remove(&name);
        world.messages.retain(|(from, to, _)| *from != name && *to != name);
    });
    destroy("destroy_agent", handle)
}

unsafe extern "C" fn params_add(_: Handle, key: *const c_char, value: *const c_char) -> c_int {
    assert!(!text_of(key).is_empty() && !text_of(value).is_empty());
    call("params_add")
}

unsafe extern "C" fn create_backend(
    _: Handle,
    plugin: *const c_char,
    _: Handle,
    place: *mut Handle,
) -> c_int {
    if text_of(plugin) != "UCX" {
        return -2;
    }
    make("create_backend", place, Value::Other)
}

unsafe extern "C" fn get_local_md(
    agent: Handle,
    data: *mut *mut c_void,
    bytes: *mut usize,
) -> c_int {
    let name = agent_of(agent);
    let status = call("get_local_md");
    if status == 0 {
        // SAFETY: 1. both places are valid for the write.
        unsafe { (*data, *bytes) = (leaked(name.as_bytes()), name.len()) };
    }
    status
}

unsafe extern "C" fn load_remote_md(
    _: Handle,
    data: *const c_void,
    bytes: usize,
    place: *mut *mut c_char,
) -> c_int {
    // SAFETY: 1. the caller's bytes are live.
    let sent = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) };
    let mut name = sent.to_vec();
    if !world(|world| world.registered.keys().any(|known| known.as_bytes() == sent)) {
        return -1;
    }
    name.push(0);
    let status = call("load_remote_md");
    if status == 0 {
        // SAFETY: 1. the place is valid for the write.
        unsafe { *place = leaked(&name).cast() };
    }
    status
}

unsafe extern "C" fn invalidate_remote_md(_: Handle, _: *const c_char) -> c_int {
    call("invalidate_remote_md")
}

unsafe extern "C" fn register_mem(agent: Handle, list: Handle, _: Handle) -> c_int {
    let status = call("register_mem");
    if status == 0 {
        world(|world| world.registered.get_mut(&agent_of(agent)).unwrap().extend(ranges_of(list)));
    }
    status
}

unsafe extern "C" fn deregister_mem(agent: Handle, list: Handle, _: Handle) -> c_int {
    let status = call("deregister_mem");
    for range in ranges_of(list) {
        world(|world| {
            let registered = world.registered.get_mut(&agent_of(agent)).unwrap();
            let at = registered.iter().position(|known| *known == range);
            let at = at.expect("what ends was registered");
            if status == 0 {
                registered.remove(at);
            }
        });
    }
    status
}

unsafe extern "C" fn opt_args_set_notif_msg(
    options: Handle,
    data: *const c_void,
    bytes: usize,
) -> c_int {
    let Value::Options(message, _) = of(options) else { panic!("no options") };
    // SAFETY: 1. the caller's bytes are live.
    *message = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes) }.to_vec();
    call("opt_args_set_notif_msg")
}

unsafe extern "C" fn opt_args_set_has_notif(options: Handle, has: bool) -> c_int {
    let Value::Options(_, is_set) = of(options) else { panic!("no options") };
    *is_set = has;
    call("opt_args_set_has_notif")
}

/// Returns whether ranges lie in what an agent has registered.
fn are_registered(agent: &str, ranges: &[Known]) -> bool {
    let is_in = |range: &Known, whole: &Known| {
        (range.0, range.3) == (whole.0, whole.3)
            && range.1 >= whole.1
            && range.1 + range.2 <= whole.1 + whole.2
    };
    world(|world| {
        let known = world.registered.get(agent);
        known.is_some_and(|known| {
            ranges.iter().all(|range| known.iter().any(|whole| is_in(range, whole)))
        })
    })
}

unsafe extern "C" fn create_xfer_req(
    agent: Handle,
    way: c_int,
    ours: Handle,
    theirs: Handle,
    peer: *const c_char,
    place: *mut Handle,
    _: Handle,
) -> c_int {
    let (from, to) = (agent_of(agent), text_of(peer));
    let (ours, theirs) = (ranges_of(ours), ranges_of(theirs));
    if !are_registered(&from, &ours) || !are_registered(&to, &theirs) {
        return -6;
    }
    let request = Value::Request { way, ours, theirs, from, to, released: false };
    make("create_xfer_req", place, request)
}

unsafe extern "C" fn post_xfer_req(_: Handle, request: Handle, options: Handle) -> c_int {
    let status = call("post_xfer_req");
    let Value::Request { way, ours, theirs, from, to, .. } = of(request) else {
        panic!("no request")
    };
    if status != 0 {
        return status;
    }
    if world(|world| world.is_slow) {
        return IN_PROGRESS;
    }
    for (our, their) in ours.iter().zip(theirs.iter()) {
        let (from, to) = if *way == 0 { (their, our) } else { (our, their) };
        // SAFETY: 1. both are registered, so they are live, and the thread is in this call alone.
        unsafe { std::ptr::copy(from.1 as *const u8, to.1 as *mut u8, our.2) };
    }
    if !options.is_null() {
        let Value::Options(message, true) = of(options) else { panic!("no message") };
        world(|world| world.messages.push((from.clone(), to.clone(), message.clone())));
    }
    0
}

unsafe extern "C" fn get_xfer_status(_: Handle, _: Handle) -> c_int {
    let status = call("get_xfer_status");
    if status == 0 && world(|world| world.is_slow) { IN_PROGRESS } else { status }
}

unsafe extern "C" fn release_xfer_req(_: Handle, request: Handle) -> c_int {
    if call("release_xfer_req") != 0 || world(|world| world.is_slow && !world.aborts) {
        return -3;
    }
    let Value::Request { released, .. } = of(request) else { panic!("no request") };
    *released = true;
    0
}

unsafe extern "C" fn destroy_xfer_req(request: Handle) -> c_int {
    let Value::Request { released, .. } = of(request) else { panic!("no request") };
    assert!(*released, "a request is released before it is freed");
    destroy("destroy_xfer_req", request)
}

unsafe extern "C" fn get_notifs(agent: Handle, map: Handle, _: Handle) -> c_int {
    let status = call("get_notifs");
    let (name, Value::Map(found)) = (agent_of(agent), of(map)) else { panic!("no map") };
    if status == 0 {
        world(|world| {
            for (from, _, message) in world.messages.extract_if(.., |(_, to, _)| *to == name) {
                found.push((CString::new(from).unwrap(), message));
            }
        });
    }
    status
}

fn map_of<'a>(map: Handle) -> &'a Vec<(CString, Vec<u8>)> {
    let Value::Map(found) = of(map) else { panic!("no map") };
    found
}

unsafe extern "C" fn notif_map_size(map: Handle, place: *mut usize) -> c_int {
    // SAFETY: 1. the place is valid for the write.
    unsafe { *place = map_of(map).len() };
    call("notif_map_size")
}

unsafe extern "C" fn notif_map_get_agent_at(
    map: Handle,
    at: usize,
    place: *mut *const c_char,
) -> c_int {
    // SAFETY: 1. the place is valid for the write.
    unsafe { *place = map_of(map)[at].0.as_ptr() };
    call("notif_map_get_agent_at")
}

unsafe extern "C" fn notif_map_get_notifs_size(
    _: Handle,
    _: *const c_char,
    place: *mut usize,
) -> c_int {
    // SAFETY: 1. the place is valid for the write.
    unsafe { *place = 1 };
    call("notif_map_get_notifs_size")
}

unsafe extern "C" fn notif_map_get_notif(
    map: Handle,
    peer: *const c_char,
    _: usize,
    place: *mut *const c_void,
    bytes: *mut usize,
) -> c_int {
    let found = map_of(map).iter().find(|(name, _)| name.as_ptr() == peer).unwrap();
    // SAFETY: 1. both places are valid for the write.
    unsafe { (*place, *bytes) = (found.1.as_ptr().cast(), found.1.len()) };
    call("notif_map_get_notif")
}

/// Returns this thread's NIXL.
#[must_use]
pub fn nixl() -> Nixl {
    Nixl(Arc::new(Api::of(
        create_configured_agent,
        destroy_agent,
        create_params,
        params_add,
        destroy_params,
        create_backend,
        destroy_backend,
        get_local_md,
        load_remote_md,
        invalidate_remote_md,
        create_reg_dlist,
        reg_dlist_add_desc,
        destroy_reg_dlist,
        register_mem,
        deregister_mem,
        create_xfer_dlist,
        xfer_dlist_add_desc,
        destroy_xfer_dlist,
        create_opt_args,
        opt_args_set_notif_msg,
        opt_args_set_has_notif,
        destroy_opt_args,
        create_xfer_req,
        post_xfer_req,
        get_xfer_status,
        release_xfer_req,
        destroy_xfer_req,
        create_notif_map,
        get_notifs,
        notif_map_size,
        notif_map_get_agent_at,
        notif_map_get_notifs_size,
        notif_map_get_notif,
        destroy_notif_map,
    )))
}
