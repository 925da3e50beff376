// Package keep changes the image store for somebody: it records who added or removed which image, how that ended and
// why, and changes nothing while nothing can be recorded.
package keep

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/sandboxd/image/build"
	"tagout/sandboxd/image/oci"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// Recorder is the audit log.
type Recorder interface {
	Log(audit.Record)
	Err() error // why it takes no records at the moment
}

// ErrUnrecorded is wrapped where nothing is done because the audit log takes no records.
var ErrUnrecorded = errors.New("the audit log takes no records, and nothing is done that is not recorded: make room for it")

// ErrBusy is wrapped where no more images may come at the moment.
var ErrBusy = errors.New("too many images are on their way")

// Keeper is the store with its records. Safe for concurrent use.
type Keeper struct {
	Store *store.Store
	Audit Recorder
}

// Wish is an image that somebody wants.
type Wish struct {
	Name   string // what cards will call it
	Actor  string // who asks, for the record
	Way    string // import, pull or build
	Source string // a path, a reference or a mirror
	Limits unpack.Limits
}

// Add is the store's, on record.
func (k *Keeper) Add(ctx context.Context, w Wish, src store.Source) (store.Manifest, error) {
	var m store.Manifest
	var gone []store.Manifest
	err := k.may()
	if err == nil {
		m, gone, err = k.Store.Add(ctx, w.Name, src, w.Limits)
	}
	k.removed(gone, w.Actor, replaced)
	if err != nil {
		return m, k.Refuse(w, err)
	}
	f := fields(&m)
	f["way"] = w.Way
	k.Audit.Log(audit.Record{Event: audit.EventImageAdded, Actor: w.Actor, Outcome: audit.OutcomeOK, Fields: f})
	return m, nil
}

// Refuse records and returns why somebody does not get an image.
func (k *Keeper) Refuse(w Wish, err error) error {
	k.refused(w.Actor, "add", err, map[string]string{"image": w.Name, "way": w.Way, "source": w.Source})
	return err
}

// Remove is the store's, on record.
func (k *Keeper) Remove(name, actor string) error {
	var gone []store.Manifest
	err := k.may()
	if err == nil {
		gone, err = k.Store.Remove(name)
	}
	if err != nil {
		k.refused(actor, "remove", err, map[string]string{"image": name})
		return err
	}
	k.removed(gone, actor, "it was to be removed")
	return nil
}

// Sweep is the store's, on record where it removed anything.
func (k *Keeper) Sweep(actor string) (store.Swept, error) {
	if err := k.may(); err != nil {
		return store.Swept{}, err
	}
	swept, err := k.Store.Sweep()
	k.removed(swept.Images, actor, replaced)
	if err != nil {
		k.refused(actor, "sweep", err, nil)
	}
	return swept, err
}

const replaced = "a newer image has its name, and no kid uses it"

func (k *Keeper) removed(gone []store.Manifest, actor, why string) {
	for _, m := range gone {
		k.Audit.Log(audit.Record{Event: audit.EventImageRemoved, Actor: actor, Outcome: audit.OutcomeOK, Detail: why, Fields: fields(&m)})
	}
}

func (k *Keeper) may() error {
	if err := k.Audit.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrUnrecorded, err)
	}
	return nil
}

// refused records what was not done. Bytes that are not those that were promised, and addresses that are not to be called,
// are an attempt at something: that is told to the box's receivers of alerts, as every deny is.
func (k *Keeper) refused(actor, what string, err error, fields map[string]string) {
	out := map[string]string{"what": what}
	maps.Copy(out, fields)
	code, outcome := ReasonOf(err), audit.OutcomeFail
	if code == reason.DigestMismatch || code == reason.PrivateAnswer || code == reason.OrderUnsigned {
		outcome = audit.OutcomeDeny
	}
	k.Audit.Log(audit.Record{Event: audit.EventImageRefused, Actor: actor, Outcome: outcome, Reason: code, Detail: err.Error(), Fields: out})
}

// fields are what a record says of an image.
func fields(m *store.Manifest) map[string]string {
	out := map[string]string{"image": m.Name, "id": m.ID, "kind": m.Kind, "source": m.Source, "digest": m.Digest,
		"size": strconv.FormatInt(m.Size, 10), "files": strconv.Itoa(m.Files)}
	left := 0
	for _, n := range m.Skipped {
		left += n
	}
	if left > 0 {
		out["left_out"] = strconv.Itoa(left)
	}
	return out
}

// ReasonOf returns the reason code of what the store, or a source of images, refused.
func ReasonOf(err error) reason.Code {
	if no := (*authority.Refusal)(nil); errors.As(err, &no) {
		return no.Code
	}
	switch {
	case errors.Is(err, ErrUnrecorded), errors.Is(err, ErrBusy), errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return reason.Capacity
	case errors.Is(err, oci.ErrDigest), errors.Is(err, store.ErrForged):
		return reason.DigestMismatch
	case errors.Is(err, oci.ErrAddress):
		return reason.PrivateAnswer
	case errors.Is(err, unpack.ErrLimit):
		return reason.TooLarge
	case errors.Is(err, store.ErrName), errors.Is(err, oci.ErrReference), errors.Is(err, build.ErrRequest):
		return reason.Malformed
	case errors.Is(err, build.ErrBusy):
		return reason.Capacity
	case errors.Is(err, store.ErrInUse):
		return reason.ImageInUse
	case errors.Is(err, store.ErrUnknown), errors.Is(err, context.Canceled):
		return reason.OK
	}
	return reason.SourceFailed
}
