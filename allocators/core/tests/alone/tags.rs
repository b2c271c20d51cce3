//! Tests that a name has one tag in the process, that a scope tags only its own thread, and that
//! both survive a panic. One of the tests uses up all tags.

use aquifer_core::{Tag, tagged};
use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::LazyLock,
    thread,
};

/// Threads that name the same things at once.
const THREADS: usize = if cfg!(miri) { 3 } else { 8 };
/// Things that they name.
const NAMES: usize = if cfg!(miri) { 43 } else { 100 };

/// Threads name the same things at once. This runs first, because one of the tests uses up
/// all tags.
static NAMED: LazyLock<Vec<Vec<Tag>>> = LazyLock::new(|| {
    thread::scope(|scope| {
        let name_all = || (0..NAMES).map(|i| Tag::named(&format!("thing {i}"))).collect();
        let namers: Vec<_> = (0..THREADS).map(|_| scope.spawn(name_all)).collect();
        namers.into_iter().map(|namer| namer.join().unwrap_or_default()).collect()
    })
});

fn tag(i: usize) -> Tag {
    NAMED[0][i]
}

#[test]
fn threads_that_name_one_thing_at_once_get_one_tag() {
    assert!(NAMED.iter().all(|tags| *tags == NAMED[0]));
    assert_eq!(NAMED[0].iter().collect::<HashSet<_>>().len(), NAMES, "other names, other tags");
    assert_eq!(tag(42), Tag::named("thing 42"));
    assert_eq!((tag(42).name(), tag(42).to_string().as_str()), ("thing 42", "thing 42"));
    assert!(
        NAMED[0].iter().all(|&tag| tag != Tag::NONE && tag != Tag::OTHER && tag.index() < Tag::MAX)
    );
}

#[test]
fn the_two_predefined_tags_have_names() {
    assert_eq!((Tag::NONE.name(), Tag::OTHER.name()), ("untagged", "other"));
    assert_eq!((Tag::NONE.index(), Tag::OTHER.index()), (0, 1));
    assert_eq!(Tag::from_index(Tag::OTHER.index()), Some(Tag::OTHER));
    assert!(Tag::from_index(Tag::MAX - 1).is_some() && Tag::from_index(Tag::MAX).is_none());
}

#[test]
fn scopes_nest_and_each_restores_what_was_before() {
    let (outer, inner) = (tag(1), tag(2));
    assert_eq!(Tag::current(), Tag::NONE);
    let seen = tagged(outer, || {
        let inside = tagged(inner, Tag::current);
        (inside, Tag::current(), tagged(Tag::NONE, Tag::current), Tag::current())
    });
    assert_eq!(seen, (inner, outer, Tag::NONE, outer));
    assert_eq!(Tag::current(), Tag::NONE);
}

#[test]
fn a_scope_that_unwinds_restores_what_was_before() {
    tagged(tag(1), || {
        let unwound = catch_unwind(AssertUnwindSafe(|| tagged(tag(2), || panic!("on purpose"))));
        assert!(unwound.is_err());
        assert_eq!(Tag::current(), tag(1));
    });
    assert_eq!(Tag::current(), Tag::NONE);
}

#[test]
fn a_scope_tags_its_own_thread_and_no_other() {
    tagged(tag(1), || {
        thread::scope(|scope| {
            let other = scope.spawn(|| (Tag::current(), tagged(tag(2), Tag::current)));
            assert_eq!(other.join().unwrap(), (Tag::NONE, tag(2)));
        });
        assert_eq!(Tag::current(), tag(1));
    });
}

#[test]
#[cfg_attr(miri, ignore = "65,536 names take minutes there, and no unsafe code is near")]
fn names_beyond_the_last_tag_share_one_and_the_others_keep_theirs() {
    let before = tag(7);
    for i in 0..Tag::MAX {
        let filler = Tag::named(&format!("filler {i}"));
        assert!(filler == Tag::OTHER || filler.name() == format!("filler {i}"));
    }
    assert_eq!(Tag::named("one more"), Tag::OTHER);
    assert_eq!(Tag::named("thing 7"), before);
    assert_eq!(Tag::named("filler 0").name(), "filler 0");
    assert_eq!(tagged(Tag::OTHER, Tag::current), Tag::OTHER);
}
