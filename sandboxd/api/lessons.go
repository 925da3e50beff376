package api

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/lessons"
)

// Lessons are the notes that there are; *lessons.Store has them.
type Lessons interface {
	List(words []string) ([]wire.Lesson, error)
	Get(name string) (wire.Lesson, error)
}

func (s *server) lessonRoutes() {
	add(s, route{id: "destroy-kid-with-lesson", method: http.MethodPost, path: "/v1/kids/{kid}/destroy", summary: "Keep a redacted note of what was learned from a kid, and destroy it; without a lesson as destroy-kid", role: RoleDestroy}, s.destroyWithLesson)
	add(s, route{id: "list-lessons", method: http.MethodGet, path: "/v1/lessons", summary: "The lessons in which all of some words occur, the newest first, each with the first line of its text", role: RoleRead}, s.listLessons)
	add(s, route{id: "get-lesson", method: http.MethodGet, path: "/v1/lessons/{lesson}", summary: "One lesson, whole", role: RoleRead}, s.getLesson)
}

type destroyWithLessonRequest struct {
	Named
	Body wire.DestroyRequest
}

type destroyReply struct{ Body wire.DestroyReply }

func (s *server) destroyWithLesson(ctx context.Context, in *destroyWithLessonRequest) (*destroyReply, error) {
	use := s.kids.CredentialUse(ctx, in.Kid) // nobody knows afterwards
	var file string
	var err error
	if in.Body.Lesson == "" {
		err = s.kids.Destroy(ctx, in.Kid, actor(ctx), in.Body.Reason)
	} else {
		file, err = s.kids.DestroyWithLesson(ctx, in.Kid, actor(ctx), in.Body.Reason, in.Body.Lesson)
	}
	if err != nil {
		return nil, refused(err)
	}
	return &destroyReply{wire.DestroyReply{Lesson: file, Credentials: use}}, nil
}

type listLessonsRequest struct {
	Page
	Words string `query:"words" maxLength:"1024" doc:"Words that all occur in it, however they are written, with spaces between."`
}

func (s *server) listLessons(_ context.Context, in *listLessonsRequest) (*listed[wire.Lesson], error) {
	all, err := s.lessons.List(strings.Fields(in.Words))
	if err != nil {
		return nil, problem(http.StatusInternalServerError, reason.Internal, err.Error())
	}
	return cutAfter(&in.Page, append([]wire.Lesson{}, all...), lessonID, func(id string) bool { return id < in.After }), nil
}

// lessonID orders lessons as the list does, from its end.
func lessonID(l wire.Lesson) string {
	return l.Destroyed.UTC().Format("2006-01-02T15:04:05.000000000Z") + " " + l.Name
}

type lessonReply struct{ Body wire.Lesson }

func (s *server) getLesson(_ context.Context, in *struct {
	Lesson string `path:"lesson" doc:"The note's name, as the list has it."`
}) (*lessonReply, error) {
	l, err := s.lessons.Get(in.Lesson)
	switch {
	case errors.Is(err, lessons.ErrNotFound):
		return nil, problem(http.StatusNotFound, reason.OK, "there is no lesson of this name: `tagout lessons` lists those that there are")
	case err != nil:
		return nil, problem(http.StatusInternalServerError, reason.Internal, err.Error())
	}
	return &lessonReply{l}, nil
}
