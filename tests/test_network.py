import os
import shutil

import numpy as np
import pytest
import reference
import tensorflow.compat.v1 as tf
from conftest import run_in_one_process
from reference import DECAYED, LAYERS

import network
from network import CheckpointError


def images_and_labels(count=6):
  draw = np.random.RandomState(0)
  return draw.normal(size=[count, 28, 28, 3]).astype(np.float32), np.eye(10, dtype=np.float32)[np.arange(count) % 10]


# ---- layers


def test_layers_shapes_names_and_parameters(full_size):
  with tf.Graph().as_default():
    network_ = network.NETWORK(*images_and_labels(), keep_prob=0.5, num_classes=10, is_training=True)
    names = [variable.op.name for variable in tf.trainable_variables()]
    shapes = {variable.op.name: variable.shape.as_list() for variable in tf.trainable_variables()}
  assert names == [layer + kind for layer in LAYERS for kind in ('/weights', '/biases')]
  assert sum(np.prod(shape) for shape in shapes.values()) == 38947914
  assert shapes['conv1_1/weights'] == [3, 3, 3, 64] and shapes['conv5_1/weights'] == [3, 3, 512, 512]
  assert shapes['fc6/weights'] == [512, 4096] and shapes['fc8/biases'] == [10]
  assert [shape for _, shape, _ in network_.layers] == (
    [[28, 28, 64], [14, 14, 64], [7, 7, 128], [7, 7, 128]] + [[4, 4, 256]] * 4 + [[2, 2, 512]] * 4 + [[1, 1, 512]] * 4
    + [[4096], [4096], [10]])  # fmt: skip
  assert network_.logits.shape.as_list() == [6, 10] and network_.losses.shape.as_list() == []


def test_kernels_are_he_normal_over_the_taps_inside_the_image_and_biases_zero(full_size):
  # By hand, of maps 28, 7, 4, 2 and 1 wide.
  inside = {'conv1': 0.953, 'conv2': 0.819, 'conv3': 6.25 / 9, 'conv4': 4 / 9, 'conv5': 1 / 9}
  with tf.Graph().as_default(), tf.Session() as session:
    network.NETWORK(*images_and_labels(), keep_prob=1, num_classes=10, is_training=True)
    session.run(tf.global_variables_initializer())
    for variable, value in zip(tf.trainable_variables(), session.run(tf.trainable_variables())):
      if value.ndim == 1:
        assert (value == 0).all()
      else:
        deviation = np.sqrt(2 / np.prod(value.shape[:-1]) / inside.get(variable.op.name[:5], 1))
        assert abs(value.std() / deviation - 1) < 0.06, variable.op.name
        assert abs(value.mean()) < 0.1 * deviation


def test_logits_and_losses_are_those_of_numpy():
  images, labels = images_and_labels(20)
  with tf.Graph().as_default(), tf.Session() as session:
    tf.set_random_seed(4)
    # keep_prob counts only in training, so the labels' losses in evaluation are without dropout.
    network_ = network.NETWORK(images, labels, 0.5, 10, False)
    session.run(tf.global_variables_initializer())
    draw = np.random.RandomState(0)
    for variable in tf.trainable_variables():
      if variable.shape.ndims == 1:
        variable.load(draw.normal(scale=0.3, size=variable.shape.as_list()), session)
    values = session.run({variable.op.name: variable for variable in tf.trainable_variables()})
    logits, losses, cross_entropy, decay = session.run(
      [network_.logits, network_.losses, network_.cross_entropy, network_.weight_decay]
    )
    with_decay = [v.op.name for v in tf.trainable_variables() if tf.gradients(network_.weight_decay, v)[0] is not None]
  expected = reference.logits(values, images)
  np.testing.assert_allclose(logits, expected, atol=1e-4 * abs(expected).max())
  assert expected.std(0).max() > 0.1  # the images are told apart, so that all layers count
  classes = labels.argmax(1)
  assert cross_entropy == pytest.approx(reference.cross_entropy(expected, classes), rel=1e-4)
  assert decay == pytest.approx(reference.weight_decay(values), rel=1e-5)
  assert losses == pytest.approx(reference.losses(values, images, classes), rel=1e-4)
  assert with_decay == [name + '/weights' for name in DECAYED]


def test_dropout_only_in_training():
  images, labels = images_and_labels()
  logits = {}
  for keep_prob, is_training in ((0.5, True), (1, True), (0.5, False), (1, False)):
    with tf.Graph().as_default(), tf.Session() as session:
      tf.set_random_seed(5)
      network_ = network.NETWORK(images, labels, keep_prob, 10, is_training)
      session.run(tf.global_variables_initializer())
      logits[keep_prob, is_training] = session.run(network_.logits), session.run(network_.logits)
  for case, (first, second) in logits.items():
    assert np.array_equal(first, second) == (case != (0.5, True)), case
  assert np.array_equal(logits[0.5, False][0], logits[1, False][0])


def test_half_of_the_units_are_dropped_and_the_others_doubled():
  with tf.Graph().as_default() as graph, tf.Session() as session:
    tf.set_random_seed(6)
    images, labels = images_and_labels(2000)
    network.NETWORK(images, labels, 0.5, 10, True)
    session.run(tf.global_variables_initializer())
    inputs = [op.inputs[0] for op in graph.get_operations() if op.type == 'MatMul'][-2:]  # of fc7 and fc8
    relus = [op.outputs[0] for op in graph.get_operations() if op.type == 'Relu'][-2:]
    for dropped, kept in zip(*session.run([inputs, relus])):
      alive = kept > 0
      assert alive.sum() > 2000 and abs((dropped[alive] > 0).mean() - 0.5) < 0.05
      np.testing.assert_allclose(dropped[dropped > 0], 2 * kept[dropped > 0], rtol=1e-5)


@pytest.mark.parametrize('height, width', [(1, 1), (2, 2), (1, 2), (2, 1), (3, 3), (4, 4), (4, 1), (2, 4), (5, 4), (7, 7)])
@pytest.mark.parametrize('channels, stride', [(6, 1), (256, 1), (6, 2)])
def test_convolve_is_tensorflows_convolution_with_its_gradients(height, width, channels, stride):
  draw = np.random.RandomState(height * 10 + width)
  with tf.Graph().as_default(), tf.Session() as session:
    images = tf.constant(draw.normal(size=[5, height, width, channels]), tf.float32)
    kernel = tf.constant(draw.normal(size=[3, 3, channels, channels + 1]), tf.float32)
    ours = network.convolve(images, kernel, stride)
    theirs = tf.nn.conv2d(images, kernel, [1, stride, stride, 1], 'SAME')
    assert ours.shape.as_list() == theirs.shape.as_list()
    weight = tf.constant(draw.normal(size=ours.shape.as_list()), tf.float32)
    results = session.run([[y] + tf.gradients(y * weight, [images, kernel]) for y in (ours, theirs)])
  for mine, expected in zip(*results):
    assert abs(mine - expected).max() <= 1e-5 * abs(expected).max()


@pytest.mark.parametrize('size, products', [(1, 1), (2, 3), (3, 5), (4, 6)])
def test_transforms_convolve_with_few_products(size, products):
  to_inputs, to_taps, to_outputs = network.transforms(size)
  x, k = np.arange(1, size + 1) ** 2, np.array([3, 5, 11])
  assert len(to_inputs) == len(to_taps) == to_outputs.shape[1] == products
  np.testing.assert_allclose(to_outputs @ ((to_taps @ k) * (to_inputs @ x)), np.correlate(np.pad(x, 1, 'constant'), k))


def test_run_alone_prints_the_layer_table_and_takes_no_flags():
  table, mistake = run_in_one_process(['network.py'], ['network.py', '--no_such_flag'])
  rows = [line.split() for line in table.stdout.splitlines()]
  assert table.status == 0 and [row[0] for row in rows[1:]] == LAYERS + ['total']
  assert ['conv1_2', '14x14x64', '36,928', '7,225,344'] in rows
  # 9 taps of 512 x 512 at each of 4 pixels, and at one.
  assert ['conv4_2', '2x2x512', '2,359,808', '9,437,184'] in rows and ['conv5_2', '1x1x512', '2,359,808', '2,359,296'] in rows
  assert rows[-1] == ['total', '38,947,914', '113,830,912']
  assert mistake.status.startswith('error: ') and "'no_such_flag'" in mistake.status and not mistake.stdout


# ---- checkpoints


@pytest.fixture
def folder(tmp_path):
  """A folder with whole checkpoints of steps 9 and 10; `checkpoint` names 10."""
  path = tmp_path / 'first place'
  path.mkdir()
  with tf.Graph().as_default(), tf.Session() as session:
    tf.get_variable('a', initializer=np.arange(6, dtype=np.float32).reshape(2, 3), use_resource=True)
    saver = tf.train.Saver()
    session.run(tf.global_variables_initializer())
    for step in (9, 10):
      saver.save(session, str(path / 'model.ckpt'), step, write_meta_graph=False)
  return path


def prefix(folder, step):
  return os.path.join(str(folder), 'model.ckpt-%d' % step)


def test_the_newest_checkpoint_is_found_wherever_the_folder_is(folder, tmp_path):
  assert network.find_checkpoint(str(folder)) == prefix(folder, 10)
  assert network.list_checkpoints(str(folder)) == [prefix(folder, 9), prefix(folder, 10)]
  moved = tmp_path / 'second place'
  shutil.move(str(folder), str(moved))  # `checkpoint` holds the old absolute path
  assert network.find_checkpoint(str(moved)) == prefix(moved, 10)


def test_a_copy_is_read_itself_not_what_it_was_copied_from(folder, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(str(folder), str(copy))
  assert network.find_checkpoint(str(copy)) == prefix(copy, 10)


def test_a_name_that_tensorflow_would_take_for_a_pattern_is_refused(tmp_path):
  for function in (network.find_checkpoint, network.resume_point):
    with pytest.raises(CheckpointError, match='rename'):
      function(str(tmp_path / 'run [1]'))


def test_checkpoint_names_the_one_to_take_even_if_it_is_not_the_last(folder):
  (folder / 'checkpoint').write_text('model_checkpoint_path: "/elsewhere/model.ckpt-9"\n')
  assert network.find_checkpoint(str(folder)) == prefix(folder, 9)


@pytest.mark.parametrize('suffix', ['', '.index', '.data-00000-of-00001'])
def test_a_prefix_or_one_of_its_files_names_a_checkpoint(folder, suffix):
  assert network.find_checkpoint(prefix(folder, 9) + suffix) == prefix(folder, 9)


def test_a_slash_at_the_end_is_no_matter(folder):
  assert network.find_checkpoint(str(folder) + '/') == prefix(folder, 10)


@pytest.mark.parametrize('lost', ['.index', '.data-00000-of-00001'])
def test_an_incomplete_checkpoint_is_never_taken(folder, lost, caplog):
  os.remove(prefix(folder, 10) + lost)
  assert network.find_checkpoint(str(folder)) == prefix(folder, 9)
  with pytest.raises(CheckpointError, match='model.ckpt-10'):
    network.find_checkpoint(prefix(folder, 10))
  os.remove(prefix(folder, 9) + lost)
  with pytest.raises(CheckpointError, match='no checkpoint in the folder'):
    network.find_checkpoint(str(folder))


@pytest.mark.parametrize('text', ['', 'nonsense {', '\x00\xff'])
def test_a_broken_checkpoint_file_does_not_hide_the_checkpoints(folder, text):
  (folder / 'checkpoint').write_text(text, encoding='latin-1')
  assert network.find_checkpoint(str(folder)) == prefix(folder, 10)


def test_a_cut_index_is_not_whole(folder):
  with open(prefix(folder, 10) + '.index', 'r+b') as f:
    f.truncate(20)
  assert network.find_checkpoint(str(folder)) == prefix(folder, 9)


def test_no_checkpoint_no_resume_point(tmp_path, folder):
  assert network.resume_point(str(tmp_path / 'none')) is None
  (tmp_path / 'notes').mkdir()
  (tmp_path / 'notes' / 'notes.txt').write_text('mine')
  assert network.resume_point(str(tmp_path / 'notes')) is None
  assert network.resume_point(str(folder)) == prefix(folder, 10)
  assert network.resume_point(prefix(folder, 9)) == prefix(folder, 9)
  for step in (9, 10):
    os.remove(prefix(folder, step) + '.data-00000-of-00001')
  with pytest.raises(CheckpointError):
    network.resume_point(str(folder))


def restored(path, shape):
  with tf.Graph().as_default(), tf.Session() as session:
    variable = tf.get_variable('a', shape, use_resource=True)
    session.run(tf.global_variables_initializer())
    return network.restore(session, [variable], str(path)), session.run(variable)


def test_restore_sets_the_variables_and_only_reads(folder):
  before = {path.name: path.read_bytes() for path in folder.iterdir()}
  path, value = restored(folder, [2, 3])
  assert path == prefix(folder, 10) and value.tolist() == [[0, 1, 2], [3, 4, 5]]
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_restore_refuses_another_network(folder):
  with pytest.raises(CheckpointError, match=r'a has shape \[2, 3\] instead of \[3, 2\]'):
    restored(folder, [3, 2])


def flip_a_byte(f):
  f.seek(5)
  byte = f.read(1)[0]
  f.seek(5)
  f.write(bytes([byte ^ 64]))


@pytest.mark.parametrize('damage', [lambda f: f.truncate(10), flip_a_byte, lambda f: f.truncate(0)])
def test_restore_refuses_damaged_values(folder, damage):
  with open(prefix(folder, 10) + '.data-00000-of-00001', 'r+b') as f:
    damage(f)
  with pytest.raises(CheckpointError, match='model.ckpt-10 is damaged'):
    restored(folder, [2, 3])


def test_restore_refuses_numbers_that_are_not_finite(tmp_path):
  with tf.Graph().as_default(), tf.Session() as session:
    tf.get_variable('a', initializer=np.array([[1, np.nan]], np.float32), use_resource=True)
    session.run(tf.global_variables_initializer())
    tf.train.Saver().save(session, str(tmp_path / 'model.ckpt'), 3, write_meta_graph=False)
  with pytest.raises(CheckpointError, match='model.ckpt-3 holds numbers that are not finite, in a'):
    restored(tmp_path, [1, 2])


def test_a_prefix_that_is_not_there_is_no_fresh_start(folder):
  for name in ('model.ckpt-777', 'best-3.index'):
    with pytest.raises(CheckpointError, match=name):
      network.resume_point(str(folder / name))
  assert network.resume_point(str(folder / 'run-1')) is None
